"""Foundations that all of vitclinic shares: errors, configs, files, statistics, records. Private to the package.

Packages import their public names when these are first used (PEP 562). A package lists its names where type checkers
and editors look for them, under `if TYPE_CHECKING:`, and in `__all__`; `make_lazy(__name__)` reads that list and
imports nothing. So `import vitclinic`, the command line's help and a typo in a recipe do not wait for torch.
"""

from __future__ import annotations

import ast
import importlib
import sys
from types import ModuleType
from typing import Any


class LazyPackage(ModuleType):
    """Package whose public names are imported when they are first used."""

    def __getattr__(self, name: str) -> Any:
        homes: dict[str, tuple[str, str]] = self.__dict__["_homes"]
        if name not in homes:
            raise AttributeError(f"module '{self.__name__}' has no attribute '{name}'")
        module, attribute = homes[name]
        if module == self.__name__:
            return importlib.import_module(f"{module}.{attribute}")
        self.__dict__[name] = value = getattr(importlib.import_module(module), attribute)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        """Keep a public name when Python sets a submodule of the same name: `exam.examine` stays the function."""
        module, _ = self.__dict__["_homes"].get(name, (self.__name__, name))
        if module == self.__name__ or not isinstance(value, ModuleType):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        names: list[str] = self.__dict__["__all__"]
        return names


def make_lazy(package: str) -> None:
    """Import the names under `if TYPE_CHECKING:` of a package's `__init__.py` when they are first used.

    Args:
        package: The package's `__name__`. Its `__all__` says what `dir` shows.

    Raises:
        ImportError: If the package was installed without its source.
    """
    module = sys.modules[package]
    loader: Any = module.__spec__.loader if module.__spec__ is not None else None
    source = loader.get_source(package)
    if source is None:
        raise ImportError(f"{package} is installed without its source, which lists its public names.")
    module.__dict__["_homes"] = _homes(source)
    module.__class__ = LazyPackage


def _homes(source: str) -> dict[str, tuple[str, str]]:
    """Return the module and attribute behind each name.

    Example:
        >>> _homes("if TYPE_CHECKING:\\n    from a.b import C, d as e\\n    from a import b")
        {'C': ('a.b', 'C'), 'e': ('a.b', 'd'), 'b': ('a', 'b')}
    """
    guarded = [node for node in ast.parse(source).body if isinstance(node, ast.If) and _is_guard(node.test)]
    imports = [node for block in guarded for node in block.body if isinstance(node, ast.ImportFrom)]
    return {
        alias.asname or alias.name: (str(node.module), alias.name)
        for node in imports
        for alias in node.names
        if node.level == 0
    }


def _is_guard(test: ast.expr) -> bool:
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"
