"""Strict, serialisable configs, and validation errors as sentences.

Every part of vitclinic keeps its own config next to its code, as a subclass of `Config`. Unknown keys are
errors with a suggestion; a section that has one obvious key (`data.source`, `model.name`) can be written as
just that value.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from vitclinic._core.errors import RecipeError, did_you_mean, shorten


class Config(BaseModel):
    """Base of all configs: strict types, no unknown keys, immutable once made.

    Example:
        >>> class Paint(Config):
        ...     main_key = "colour"
        ...     colour: str = "red"
        ...     coats: int = 1
        >>> validate(Paint, "blue").colour
        'blue'
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())

    main_key: ClassVar[str | None] = None
    """The key that a bare value stands for: `data: cifar` means `data: {source: cifar}`."""

    @model_validator(mode="before")
    @classmethod
    def _bare_value(cls, value: Any) -> Any:
        return cls.expand(value)

    @classmethod
    def expand(cls, value: Any) -> Any:
        """Return `value` as a mapping, with a bare value put under the main key."""
        if cls.main_key is None or isinstance(value, Mapping | BaseModel):
            return value
        return {cls.main_key: value}


class Settings(Config):
    """Base of what a user sets, whose numbers are finite; those of records need not be."""

    model_config = ConfigDict(allow_inf_nan=False)


C = TypeVar("C", bound=Config)


def validate(config: type[C], value: Any, *, where: str = "") -> C:
    """Build `config` from plain data; raise a `RecipeError` that names the key if something is wrong."""
    try:
        return config.model_validate(value)
    except ValidationError as error:
        problems = [_sentence(config, problem, where) for problem in error.errors()]
        raise RecipeError(" ".join(_join_alternatives(dict.fromkeys(problems)))) from None


_ALTERNATIVE = re.compile(r"('[^']*': input should be )(.*)( \(got .*\)\.)", re.DOTALL)


def _join_alternatives(sentences: Iterable[str]) -> list[str]:
    """Make one sentence of those about one value that may be of several types."""
    joined: dict[Any, list[str]] = {}
    for sentence in sentences:
        found = _ALTERNATIVE.fullmatch(sentence)
        joined.setdefault((found[1], found[3]) if found else sentence, []).append(found[2] if found else sentence)
    return [
        f"{key[0]}{' or '.join(wanted)}{key[1]}" if isinstance(key, tuple) else key for key, wanted in joined.items()
    ]


def section(config: type[Config], key: str) -> type[Config] | None:
    """Return the config class behind `key` of `config`, or None if `key` holds a plain value."""
    field = config.model_fields.get(key)
    if field is None:
        return None
    candidates = [field.annotation, *typing.get_args(field.annotation)]
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, Config)), None)


SENTENCE = "sentence"
"""The type of a `PydanticCustomError` whose message is already a whole sentence that names its key."""

_REPEATED = 60
"""Characters of a section that an error repeats; one that is longer is too much to read."""


def _sentence(config: type[Config], problem: Any, where: str) -> str:
    unknown = problem["type"] == "extra_forbidden"  # then the last part is a key that the user wrote
    written = problem["loc"][-1:] if unknown else ()
    parts = [part for part in problem["loc"][: -1 if unknown else None] if not _is_union_member(part)]
    path = [str(part) for part in (*parts, *written)]
    key = ".".join([*([where] if where else []), *path])
    if unknown:
        owner = _owner(config, path[:-1])
        known = list(owner.model_fields) if owner else []
        hint = _suggest_section(owner, path[-1]) or did_you_mean(path[-1], known)
        return f"Unknown key '{key}'." + (hint or f" Known here: {', '.join(known)}.")
    if problem["type"] == SENTENCE:
        return str(problem["msg"])
    if problem["type"] == "missing":
        return f"'{key}' is required."
    message = problem["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    message = re.sub(r"a valid dictionary( or instance of \w+)?$", "keys and values", message)
    if not key:
        return f"{message[:1].upper()}{message[1:].rstrip('.')}."
    message = message[:1].lower() + message[1:]
    if isinstance(problem["input"], Mapping) and (message.endswith("?") or len(repr(problem["input"])) > _REPEATED):
        return f"'{key}': {message}" if message.endswith(("?", ".")) else f"'{key}': {message}."
    return f"'{key}': {message.rstrip('.')} (got {shorten(problem['input'])})."


def _owner(config: type[Config], path: list[str]) -> type[Config] | None:
    owner: type[Config] | None = config
    for part in path:
        if owner is None or part in owner.model_fields:  # else the name or number of an entry, as in measures.x
            owner = section(owner, part) if owner else None
    return owner


def _suggest_section(owner: type[Config] | None, word: str) -> str:
    """Return ` Did you mean 'optimizer.lr'?` for a key of a section that was written without its section."""
    sections = {name: section(owner, name) for name in owner.model_fields} if owner else {}
    found = [
        f"'{name}.{word.lower()}'" for name, inner in sections.items() if inner and word.lower() in inner.model_fields
    ]
    return f" Did you mean {' or '.join(found)}?" if found else ""


def _is_union_member(part: Any) -> bool:
    """Return True for the name of a union member, which pydantic puts into the path: `Augment`, `float`, `none`."""
    if not isinstance(part, str):
        return False
    return part in _PLAIN or "[" in part or part.startswith("constrained-") or part in _config_names(Config)


def _config_names(config: type[Config]) -> set[str]:
    return {config.__name__}.union(*(_config_names(inner) for inner in config.__subclasses__()))


_PLAIN = {t.__name__ for t in (int, float, str, bool, list, dict, tuple, types.NoneType)} | {"none"}
