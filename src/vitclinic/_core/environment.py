"""Variables of the environment that torchrun sets."""

from __future__ import annotations

import os

from vitclinic._core.errors import RecipeError


def read_count(name: str, default: int = 1) -> int:
    """Return the whole number in a variable of the environment, or the default if it is not set.

    Raises:
        RecipeError: It holds something else.

    Example:
        >>> read_count("LOCAL_WORLD_SIZE_OF_NOBODY")
        1
    """
    text = os.environ.get(name, "").strip() or str(default)
    if not text.isdecimal() or len(text) > 9:
        raise RecipeError(f"The environment variable {name} is '{text[:80]}', and torchrun sets a number: unset it.")
    return int(text)
