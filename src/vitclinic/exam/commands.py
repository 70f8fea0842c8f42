"""Commands beside a finding: what trains the network with a suggestion, and what measures both again.

They have the names of what was examined, quoted for the shell. Of a module or a loader of one's own, which have no
name, they are calls in Python.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from vitclinic._core.records import Finding, Suggestion
from vitclinic._core.sources import LIBRARIES
from vitclinic.training import Run

_PYTHON_ONLY = ("mean", "std", "normalized")
"""Options of `examine` that the command line does not have."""


@dataclass(frozen=True)
class Origin:
    """Target and data as the user named them.

    Example:
        >>> origin = Origin("timm:resnet18", data="my photos/")
        >>> origin.examine(["accuracy"])
        "vitclinic examine timm:resnet18 --data 'my photos/' --probes accuracy"
    """

    target: str | None
    """The target's name; None for a module."""
    data: str | None = None
    """The data's name; None for that of the run."""
    named: bool = True
    """False if the data is a loader, or another object without a name."""
    run: Run | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further options of `examine` that are not at their defaults, such as `split`."""
    objects: tuple[str, ...] = ()
    """Options that were given an object without a name, such as `output`."""

    @property
    def is_shell(self) -> bool:
        """True if the exam can be repeated by a command."""
        only = self.objects or any(name in self.options for name in _PYTHON_ONLY)
        return self.target is not None and self.named and not only

    def examine(self, probes: Sequence[str], treated: Sequence[str] = ()) -> str:
        """Return what measures the network again, beside the treated ones; no probes mean its report."""
        if self.is_shell:
            words = ["vitclinic", "examine" if probes else "report", _from_here(str(self.target)), *treated]
            if probes:
                words += [] if self.data is None else ["--data", _from_here(self.data)]
                for name, value in self.options.items():
                    flag = f"--{name.replace('_', '-')}"
                    words += [flag] if value is True else [flag, str(value)]
                words += ["--probes", ",".join(probes)]
            return shlex.join(words)
        target = "model" if self.target is None else json.dumps(self.target)
        data = ([] if self.data is None else [f"data={json.dumps(self.data)}"]) if self.named else ["data=loader"]
        options = [f"{name}={value!r}" for name, value in self.options.items()]
        options += [f"{name}={name}" for name in self.objects]
        chosen = [f"probes={json.dumps(list(probes))}"] if probes else []
        return f"vitclinic.examine({', '.join([target, *data, *options, *chosen])})"

    def treated(self, treatment: str) -> str | None:
        """Return the folder of the run with a treatment, of its own for each; None if no command trains it."""
        if not self.is_shell or self._base() is None:
            return None
        behind = _name(treatment)
        if self.run is not None:
            return f"{_from_here(str(self.run.path))}-{behind}"
        return f"runs/{_name(str(self.target).partition('?')[0])}-{behind}"

    def _base(self) -> list[str] | None:
        """Return the words of `train` that train the same network as before."""
        if self.run is not None:
            return [_from_here(str(self.run.path / "recipe.yaml"))]
        if self.data is None or str(self.target).partition(":")[0] not in LIBRARIES:
            return None
        if not self.options.get("random_weights"):
            return [f"data={_value(_from_here(self.data))}", f"init={_value(_from_here(str(self.target)))}"]
        library, _, name = str(self.target).partition(":")
        is_plain = library == "timm" and not set(name) & set("?@")
        return [f"data={_value(_from_here(self.data))}", f"model={name}"] if is_plain else None

    def treat(self, treatment: str) -> str | None:
        """Return what trains the network with a treatment or a change to the recipe; None if nothing does."""
        out = self.treated(treatment)
        if out is None:
            return self._treat_in_python(treatment)
        change = treatment
        if "=" not in treatment:
            before = [] if self.run is None else list(self.run.recipe.plain().get("treatments", []))
            if treatment in [next(iter(one)) if isinstance(one, Mapping) else one for one in before]:
                return None
            change = f"treatments={_flow([*before, treatment])}"
        return shlex.join(["vitclinic", "train", *(self._base() or []), change, f"out={_value(out)}"])

    def _treat_in_python(self, treatment: str) -> str | None:
        from vitclinic.treatments import Treatment, known_treatments

        known = known_treatments().get(treatment)
        changes_network = known is not None and known.operate is not Treatment.operate
        return f"model = vitclinic.treat(model, {json.dumps(treatment)})" if changes_network else None


def add_commands(findings: Sequence[Finding], origin: Origin) -> list[Finding]:
    """Return findings with the commands that treat the network, and the one that measures it again."""
    return [_add(finding, origin) for finding in findings]


def _add(finding: Finding, origin: Origin) -> Finding:
    suggestions: tuple[Suggestion, ...] = tuple(
        one.model_copy(update={"command": origin.treat(one.treatment)}) for one in finding.suggestions
    )
    names = [name.partition(".")[0] for name in finding.numbers]
    probes = list(dict.fromkeys(name for name in names if name != "training"))
    folders = [origin.treated(one.treatment) for one in suggestions if one.command]
    treated = list(dict.fromkeys(folder for folder in folders if folder))
    if not probes and not (origin.is_shell and origin.run is not None):
        probes = ["accuracy"]  # a report without probes is that of a run
    return finding.model_copy(update={"suggestions": suggestions, "again": origin.examine(probes, treated)})


def _from_here(text: str) -> str:
    """Return a target or data with an absolute path as it is seen from the current folder: pages show no other."""
    before, mark, path = text.rpartition("@") if "@/" in text else ("", "", text)
    return f"{before}{mark}{os.path.relpath(path)}" if os.path.isabs(path) else text


def _name(text: str) -> str:
    """Return a text as a part of a folder's name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")


def _value(text: str) -> str:
    """Return a text as the value of `key=value`, where it would be read as YAML."""
    try:
        same = yaml.safe_load(text) == text
    except yaml.YAMLError:
        same = False
    return text if same else json.dumps(text)


def _flow(values: list[Any]) -> str:
    return yaml.safe_dump(values, default_flow_style=True, width=10**6, sort_keys=False).strip()
