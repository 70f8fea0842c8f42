"""Show `Example:` of our docstrings as code: the parser of the reference knows that section as `Examples:` only."""

from __future__ import annotations

import re
from typing import Any

import griffe

_HEADING = re.compile(r"^(\s*)Example:[ ]*$", re.MULTILINE)


class Examples(griffe.Extension):
    """Rename the section wherever a docstring has it."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _HEADING.sub(r"\1Examples:", obj.docstring.value)
