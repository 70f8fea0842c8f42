"""YAML and JSON in which a key stands once: their own readers keep the last of two and say nothing."""

from __future__ import annotations

import json
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"the key '{key.value}' is there twice", problem_mark=key.start_mark)
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else None)
        return node


def read_yaml(text: str) -> Any:
    """What YAML text says; a yaml.YAMLError where it is none, or has a key twice."""
    return yaml.load(text, _Loader)


def read_json(text: str) -> Any:
    """What JSON text says; a ValueError where it is none, or has a key twice."""
    return json.loads(text, object_pairs_hook=_table)


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key '{key}' is there twice")
        found[key] = value
    return found
