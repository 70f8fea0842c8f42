"""Plain data as text: its digest, and YAML and JSON readers that reject duplicate keys.

The standard readers silently keep the last of two.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"duplicate key '{key.value}'", problem_mark=key.start_mark)
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else None)
        return node


def read_yaml(text: str) -> Any:
    """Parse YAML; raise a yaml.YAMLError if it is invalid or has a duplicate key."""
    return yaml.load(text, _Loader)


def read_json(text: str) -> Any:
    """Parse JSON; raise a ValueError if it is invalid or has a duplicate key."""
    return json.loads(text, object_pairs_hook=_table)


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"duplicate key '{key}'")
        found[key] = value
    return found


def fingerprint(*parts: Any) -> str:
    """Return the SHA-256 of plain data, by way of its JSON: a short name for it."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
