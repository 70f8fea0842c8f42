"""Facts about the built-in probes, treatments and tasks, read from their source without importing it.

`vitclinic list` and the message about a mistyped name or option need names, first lines and options, and must not wait
for torch. Most of these are literals in the class and are read as such; a class with computed facts raises `Unreadable`
and has to be imported. There is no index that could get out of date.
"""

from __future__ import annotations

import ast
import operator
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, create_model

from vitclinic._core.config import Config
from vitclinic._core.errors import ModelError, did_you_mean

Options = dict[str, dict[str, Any]]
"""`{option: {"default": value, "description": text}}`."""


class Unreadable(Exception):  # noqa: N818 (not an error: the class is then imported)
    """Signal that a fact is not a literal, so that the class has to be imported."""


@dataclass(frozen=True)
class SourceClass:
    """Class as declared in its source."""

    module: SourceModule
    node: ast.ClassDef

    @property
    def summary(self) -> str:
        """First line of the docstring."""
        return (ast.get_docstring(self.node) or "").split("\n")[0]

    def fact(self, name: str) -> Any:
        """Return the value of a class attribute, its own or inherited."""
        for cls in self.lineage():
            for statement in cls.node.body:
                if name in _targets(statement) and (value := getattr(statement, "value", None)) is not None:
                    return cls.module.evaluate(value)
        raise Unreadable(name)

    def options(self) -> Options:
        """Return the fields with defaults and descriptions, inherited ones first."""
        return {name: module.option(field.value) for name, module, field in self._fields()}

    def config(self) -> type[Config]:
        """Return a config with the same fields, which accepts whatever the class itself accepts, and perhaps more.

        Types and constraints are checked where the source states them; validators, which are code, are not run.

        Example:
            >>> read_classes("vitclinic.treatments")["sam"].config().model_fields["rho"].annotation
            <class 'float'>
        """
        coded = any(_runs_first(statement) for cls in self.lineage() for statement in cls.node.body)
        fields: dict[str, Any] = {
            name: (Any if coded else module.type_of(field.annotation), None) for name, module, field in self._fields()
        }
        return create_model(self.node.name, __base__=Config, **fields)

    def _fields(self) -> Iterator[tuple[str, SourceModule, ast.AnnAssign]]:
        """Yield the fields with the modules that declare them, inherited ones first."""
        for cls in reversed(list(self.lineage())):
            for statement in cls.node.body:
                if isinstance(statement, ast.AnnAssign) and not _is_class_variable(statement.annotation):
                    for name in _targets(statement):
                        yield name, cls.module, statement

    def lineage(self) -> Iterator[SourceClass]:
        """Yield the class and its bases within vitclinic, the class first."""
        yield self
        for base in self.node.bases:
            cls = self.module.find_class(base.id) if isinstance(base, ast.Name) and base.id != Config.__name__ else None
            if cls is not None:
                yield from cls.lineage()


@dataclass(frozen=True)
class SourceModule:
    """Module as declared in its source."""

    name: str
    tree: ast.Module

    def classes(self, decorator: str) -> Iterator[SourceClass]:
        """Yield the classes decorated with `@decorator`."""
        for node in self.tree.body:
            if isinstance(node, ast.ClassDef) and any(
                isinstance(one, ast.Name) and one.id == decorator for one in node.decorator_list
            ):
                yield SourceClass(self, node)

    def find_class(self, name: str) -> SourceClass | None:
        """Return a class of this module, or one that it imports from another module of vitclinic."""
        for node in self.tree.body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                return SourceClass(self, node)
        home = self._find_import(name)
        return None if home is None else home.find_class(name)

    def option(self, value: ast.expr | None) -> dict[str, Any]:
        """Return default and description of a field: `x` or `Field(x, description=...)`."""
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "Field":
            described = next((word.value for word in value.keywords if word.arg == "description"), None)
            if not value.args:
                raise Unreadable("a field without a default")
            text = "" if described is None else self.evaluate(described)
            return {"default": self.evaluate(value.args[0]), "description": text}
        if value is None:
            raise Unreadable("a field without a default")
        return {"default": self.evaluate(value), "description": ""}

    def type_of(self, annotation: ast.expr) -> Any:
        """Return the type that an annotation states; `Any` if it takes code to tell what it accepts."""
        try:
            return self._type(annotation)
        except Unreadable:
            return Any

    def _type(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=None):
                return None
            case ast.Name(id=name) if name in _TYPES:
                return _TYPES[name]
            case ast.Name(id=name):
                return self._alias(name)
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                return self._type(left) | self._type(right)
            case ast.Subscript(value=ast.Name(id="list"), slice=inner):
                return list[self._type(inner)]  # type: ignore[misc]
            case ast.Subscript(value=ast.Name(id="Literal"), slice=inner):
                return Literal[self.evaluate(inner)]
            case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[inner, *marks])):
                limits = [limit for mark in marks for limit in self._limits(mark)]
                return Annotated[self._type(inner), *limits] if limits else self._type(inner)
        raise Unreadable(ast.unparse(node))

    def _limits(self, mark: ast.expr) -> Iterator[Any]:
        """Yield the constraint that `Field(ge=...)` states; a validator that runs afterwards only rejects more."""
        match mark:
            case ast.Call(func=ast.Name(id="Field"), args=[], keywords=words):
                yield Field(**{str(word.arg): self.evaluate(word.value) for word in words})
            case ast.Call(func=ast.Name(id="AfterValidator")):
                return
            case _:
                raise Unreadable(ast.unparse(mark))

    def _alias(self, name: str) -> Any:
        """Return the type that a name of this module, or one that it imports from vitclinic, stands for."""
        for statement in self.tree.body:
            if name in _targets(statement) and (value := getattr(statement, "value", None)) is not None:
                return self._type(value)
        home = self._find_import(name)
        if home is None:
            raise Unreadable(name)
        return getattr(import_module(home.name), name) if home.name == _TIME else home._alias(name)

    def evaluate(self, node: ast.expr) -> Any:
        """Return the value of an expression made of literals and constants.

        Raises:
            Unreadable: Where it is made of anything else.
        """
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return self._constant(name)
            case ast.Tuple(elts=items):
                return tuple(self._items(items))
            case ast.List(elts=items):
                return list(self._items(items))
            case ast.Set(elts=items):
                return set(self._items(items))
            case ast.Call(func=ast.Name(id="frozenset"), args=arguments, keywords=[]):
                return frozenset(*(self.evaluate(argument) for argument in arguments))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self.evaluate(operand)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](self.evaluate(left), self.evaluate(right))
            case ast.JoinedStr(values=parts):
                return "".join(str(self.evaluate(part)) for part in parts)
            case ast.FormattedValue(value=value, conversion=-1, format_spec=None):
                return self.evaluate(value)
        raise Unreadable(ast.unparse(node))

    def _items(self, nodes: list[ast.expr]) -> Iterator[Any]:
        for node in nodes:
            if isinstance(node, ast.Starred):
                yield from self.evaluate(node.value)
            else:
                yield self.evaluate(node)

    def _constant(self, name: str) -> Any:
        for statement in self.tree.body:
            if name in _targets(statement) and (value := getattr(statement, "value", None)) is not None:
                return self.evaluate(value)
        home = self._find_import(name)
        if home is None:
            raise Unreadable(name)
        return home._constant(name)

    def _find_import(self, name: str) -> SourceModule | None:
        for node in self.tree.body:
            if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
                return read_module(str(node.module)) if str(node.module).startswith("vitclinic.") else None
        return None


_TYPES = {type_.__name__: type_ for type_ in (bool, int, float, str)}
_TIME = "vitclinic._core.time"
"""Its types are imported, for it does without torch."""

_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}


def _targets(statement: ast.stmt) -> list[str]:
    """Return the names that a statement assigns."""
    if isinstance(statement, ast.AnnAssign):
        return [statement.target.id] if isinstance(statement.target, ast.Name) else []
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _runs_first(statement: ast.stmt) -> bool:
    """Return True for a validator that sees values before their types are checked, and may accept others."""
    decorators = statement.decorator_list if isinstance(statement, ast.FunctionDef) else []
    words = [word for one in decorators if isinstance(one, ast.Call) for word in one.keywords if word.arg == "mode"]
    return any(not (isinstance(word.value, ast.Constant) and word.value.value == "after") for word in words)


def _is_class_variable(annotation: ast.expr) -> bool:
    inner = annotation.value if isinstance(annotation, ast.Subscript) else annotation
    return isinstance(inner, ast.Name) and inner.id == "ClassVar"


@cache
def read_module(name: str) -> SourceModule:
    """Read the source of a module of vitclinic, without importing it."""
    root, *path = name.split(".")
    base = Path(str(sys.modules[root].__file__)).parent.joinpath(*path)
    file = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    return SourceModule(name, ast.parse(file.read_text(encoding="utf-8")))


@cache
def read_classes(package: str, decorator: str = "register") -> dict[str, SourceClass]:
    """Return the classes under `@register` in a package of vitclinic, by their `name`.

    Example:
        >>> read_classes("vitclinic.treatments")["sam"].options()["rho"]["default"]
        0.1
    """
    root, *path = package.split(".")
    if root != "vitclinic":
        return {}
    folder = Path(str(sys.modules[root].__file__)).parent.joinpath(*path)
    found: dict[str, SourceClass] = {}
    for file in sorted(folder.rglob("*.py")):
        if f"\n@{decorator}\n" in file.read_text(encoding="utf-8"):
            module = ".".join([package, *file.relative_to(folder).with_suffix("").parts])
            found.update({str(cls.fact("name")): cls for cls in read_module(module).classes(decorator)})
    return dict(sorted(found.items()))


LIBRARIES = ("timm", "torchvision", "hf")
"""Libraries whose networks are named as `LIBRARY:NAME`."""


def read_model_names() -> list[str]:
    """Return every name in timm's registry including our networks, in timm's order, read from the sources of both."""
    spec = find_spec("timm")
    folders = [Path(str(sys.modules["vitclinic"].__file__)).parent / "models"]
    if spec is not None:
        folders += [Path(folder) / "models" for folder in spec.submodule_search_locations or ()]
    texts = [file.read_text(encoding="utf-8") for folder in folders for file in folder.glob("*.py")]
    names = {name for text in texts for name in re.findall(r"^@register_model.*\ndef (\w+)", text, re.MULTILINE)}
    return sorted(names, key=lambda name: [int(s) if s.isdigit() else s for s in re.split(r"(\d+)", name)])


def check_model_name(name: str) -> None:
    """Raise a ModelError if timm and vitclinic have no network of that name.

    Nothing is checked if timm is loaded, or a package extends vitclinic: either may have registered more networks.
    """
    if "timm" in sys.modules or any(group.startswith("vitclinic.") for group in entry_points().groups):
        return
    if name.partition(":")[0] in LIBRARIES[1:]:
        return
    names = read_model_names()
    if name.partition(".")[0] not in names:  # after the dot is a tag of its weights
        raise ModelError(f"There is no model '{name}'.{did_you_mean(name, names)} See `vitclinic list models`.")
