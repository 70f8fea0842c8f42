"""Registries of what users refer to by name: probes, treatments, tasks and network families; and facts about each.

A package adds its own by an entry point of the group `vitclinic.probes`, `vitclinic.treatments`, `vitclinic.tasks` or
`vitclinic.families`; from then on it is listed, parsed, planned and reported like the built-in ones. Rules of findings
(`vitclinic.rules`) and figures that take code (`vitclinic.figures`) come the same way.

The built-in ones are in the package named like the group, each under `@register`. Their names and facts are read from
the source, and a module is imported only when its class is needed: a typo is reported without importing torch.

Facts about a probe that do not depend on the network (`ProbeFacts`) are class attributes, and each of its measurements
carries them in its JSON. A report reads them from there, so that it imports no probe and treats the probes of installed
packages like ours.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, Literal, TypeVar

from pydantic import Field, model_validator

from vitclinic._core.config import Config, validate
from vitclinic._core.errors import RecipeError, did_you_mean
from vitclinic._core.sources import Options, SourceClass, Unreadable, read_classes

Better = Literal["higher", "lower", "nearer to 0"]

KeyScalars = Mapping[str, Better | None]
"""The scalars that a summary shows, in order, and which way each is better; None if neither way."""

LAST = 1000
"""The rank of a probe that states none."""
OTHER = "Other"
"""The group of a probe that states none."""


class FigureSpec(Config):
    """Declaration of a figure that is drawn from a probe's numbers, without code.

    Four kinds of plot suffice for most probes:

    - `states`: a value of the units by depth, joined, for numbers of the state *after* each unit; the shade between two
      points is the unit that leads from one to the other.
    - `units`: a value of the units by depth, as bars, for numbers of the unit itself.
    - `layers`: one panel a value, all networks in it, from the first layer that has the value to the last.
    - `scalars`: bars of the measurement's scalars, a bar a network.

    Example:
        >>> spec = FigureSpec(
        ...     name="confidence",
        ...     kind="scalars",
        ...     values={"confidence": "mean confidence"},
        ...     axis="share",
        ...     title="Mean confidence",
        ...     reading="Each bar is one network. Higher is more confident.",
        ... )
        >>> spec.kind
        'scalars'
    """

    name: str
    """Name for `Exam.figure`: letters, digits and hyphens."""
    kind: Literal["states", "units", "layers", "scalars"]
    values: dict[str, str]
    """The values or scalars to plot, each with the title of its axis (of `scalars`: of its row)."""
    axis: str = ""
    """Title of the other axis: of `layers`, what a point stands for (a unit); of `scalars`, what the bars measure."""
    title: str
    reading: str
    """Two sentences on how to read it."""
    paper: str = ""
    share: bool = False
    """True if the values are shares, shown in percent."""
    table: list[str] = Field(default_factory=list)
    """Further values that the figure's table has."""

    @model_validator(mode="after")
    def _one_value_in_a_panel(self) -> FigureSpec:
        if not self.values or (self.kind in ("states", "units") and len(self.values) > 1):
            raise ValueError(f"a figure of kind '{self.kind}' shows one value; 'layers' and 'scalars' show several")
        return self


class ProbeFacts(Config):
    """Facts about a probe, as its measurements carry them."""

    title: str
    question: str = ""
    """The question that the probe answers, in one sentence."""
    group: str = OTHER
    """The part of the report it belongs to."""
    rank: int = LAST
    """Its place in plans, and within its group: smaller comes first."""
    key_scalars: dict[str, Better | None] = Field(default_factory=dict)
    """The scalars of the summary, in order, and which way each is better; empty: the first six, neither way better."""
    paper: str = ""
    figures: list[FigureSpec] = Field(default_factory=list)


log = logging.getLogger(__name__)

T = TypeVar("T", bound=Config)
C = TypeVar("C", bound=type[Config])
V = TypeVar("V", bound=Config)


@dataclass(frozen=True)
class Facts:
    """Entry of a class in `vitclinic list`."""

    name: str
    about: str
    """The first line of its docstring."""
    attributes: Mapping[str, Any]
    options: Options


class Registry(Generic[T]):
    """Classes of one kind by their `name`, each a strict config whose fields are its options.

    Example:
        >>> from typing import ClassVar
        >>> class Paint(Config):
        ...     name: ClassVar[str] = "paint"
        ...     coats: int = 1
        >>> paints = Registry[Paint]("paint", "example.paints", (Paint,))
        >>> _ = paints.register(Paint)
        >>> paints.parse([{"paint": {"coats": 2}}])
        [Paint(coats=2)]
    """

    def __init__(self, noun: str, group: str, bases: tuple[type, ...]) -> None:
        """Create an empty registry.

        Args:
            noun: The word for one of them in messages and in `vitclinic list NOUNs`.
            group: The entry point group by which installed packages add to it, and the package of the built-in ones.
            bases: Base classes; a registered class must derive from one of them.
        """
        self.noun, self.group, self.bases = noun, group, bases
        self._known: dict[str, type[T]] = {}

    def register(self, cls: C) -> C:
        """Register a class under its `name`; can be used as a decorator."""
        if not isinstance(cls, type) or not issubclass(cls, self.bases):
            expected = " or ".join(base.__name__ for base in self.bases)
            raise TypeError(f"{getattr(cls, '__name__', repr(cls))} is not a {self.noun}: derive it from {expected}")
        if cls.__module__.startswith(f"{self.group}."):  # imported late, it must not replace a user's own
            self._known.setdefault(cls.name, cls)  # type: ignore[attr-defined,arg-type]
        else:
            self._known[cls.name] = cls  # type: ignore[attr-defined,assignment]
        return cls

    def names(self) -> list[str]:
        """Return all names in alphabetical order, without importing built-in modules."""
        load_entry_points(self.group, self.register)
        return sorted({*self._known, *read_classes(self.group)})

    def all(self) -> dict[str, type[T]]:
        """Return all classes by name, in alphabetical order."""
        return {name: self.get(name) for name in self.names()}

    def check(self, name: str, options: Any = None) -> None:
        """Raise a RecipeError if there is no class with that name, or it does not take these options.

        A built-in class is not imported for that; what only its code can tell about an option is not checked.
        """
        names = self.names()
        if name not in names:
            hint = did_you_mean(str(name), names) or f" See `vitclinic list {self.noun}s`."
            raise RecipeError(f"There is no {self.noun} '{name}'.{hint}")
        if options and isinstance(options, Mapping) and name not in self._known:
            self._validate(read_classes(self.group)[name].config(), name, options)

    def get(self, name: str) -> type[T]:
        """Return the class with that name.

        Raises:
            RecipeError: There is none.
        """
        self.check(name)
        if name not in self._known:
            self._known[name] = _load(read_classes(self.group)[name])
        return self._known[name]

    def facts(self, *attributes: str) -> list[Facts]:
        """Return the facts of each class, with these class attributes; imports it only if the source is not enough.

        Example:
            >>> from vitclinic.treatments.treatment import TREATMENTS
            >>> next(facts for facts in TREATMENTS.facts("paper") if facts.name == "gap_head").attributes
            {'paper': 'park2022 Sec. 2, Fig. 6'}
        """
        return [self._facts(name, attributes) for name in self.names()]

    def _facts(self, name: str, attributes: tuple[str, ...]) -> Facts:
        stated = read_classes(self.group).get(name)
        if stated is not None and name not in self._known:
            try:
                values = {attribute: stated.fact(attribute) for attribute in attributes}
                return Facts(name, stated.summary, values, stated.options())
            except Unreadable:
                pass
        cls = self.get(name)
        values = {attribute: getattr(cls, attribute) for attribute in attributes}
        return Facts(name, (cls.__doc__ or "").split("\n")[0], values, _options(cls))

    def parse(self, entries: Sequence[Any]) -> list[T]:
        """Turn `["norms", {"cost": {"repeats": 20}}]` into configs, in order.

        Raises:
            RecipeError: A name is unknown or listed twice, or an option does not exist or has an invalid value.
        """
        parsed = [self._parse(entry) for entry in entries]
        names = [type(one).name for one in parsed]  # type: ignore[attr-defined]
        for name in names:
            if names.count(name) > 1:
                raise RecipeError(f"'{self.noun}s': '{name}' is listed twice.")
        return parsed

    def _parse(self, entry: Any) -> T:
        if isinstance(entry, self.bases):
            return entry  # type: ignore[return-value]
        if isinstance(entry, str):
            entry = {entry: {}}
        if not isinstance(entry, Mapping) or len(entry) != 1:
            raise RecipeError(f"'{self.noun}s': write a name or {{name: {{option: value}}}} (got {entry!r}).")
        ((name, options),) = entry.items()
        self.check(name, options)
        return self._validate(self.get(name), name, options)

    def _validate(self, cls: type[V], name: str, options: Any) -> V:
        if options and not cls.model_fields:
            raise RecipeError(f"The {self.noun} '{name}' has no options (got {', '.join(map(repr, options))}).")
        return validate(cls, options or {}, where=f"{self.noun}s.{name}")


def _load(stated: SourceClass) -> Any:
    return getattr(import_module(stated.module.name), stated.node.name)


def _options(config: type[Config]) -> Options:
    return {
        name: {"default": field.get_default(call_default_factory=True), "description": field.description or ""}
        for name, field in config.model_fields.items()
    }


@cache
def load_entry_points(group: str, register: Callable[[Any], object]) -> None:
    """Pass the objects of the entry points of `group` to `register`, once per process.

    One that cannot be loaded, or that `register` rejects with an exception, is skipped with a warning.
    """
    for point in entry_points(group=group):
        try:
            register(point.load())
        except Exception as error:  # another package's code may raise anything; ours must still work
            log.info("%s cannot be used", point, exc_info=error)
            log.warning("The entry point %s is skipped: %s: %s", _describe(point), type(error).__name__, error)


def _describe(point: EntryPoint) -> str:
    package = "" if point.dist is None else f" of the package {point.dist.name}"
    return f"{point.name} = {point.value}{package} ({point.group})"
