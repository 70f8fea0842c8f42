"""Questions about a scene, with their answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from vitclinic.data.annotations.annotation import Question


def list_answers(shapes: Sequence[str], colours: Sequence[str], most: int) -> tuple[str, ...]:
    """Return every answer there is to a question about a scene of at most `most` shapes."""
    return ("yes", "no", *colours, *shapes, *(str(number) for number in range(most + 1)))


def ask(things: Sequence[tuple[str, str]], shapes: Sequence[str], random: np.random.Generator) -> tuple[Question, ...]:
    """Return the questions about a scene.

    They are what colour each shape is that is there once, what shape each thing is that alone has its colour, whether a
    kind is there (one that is, one that is not), and how many there are of a kind and in all.

    Args:
        things: Shape and colour of each thing.
        shapes: All kinds of shapes.
        random: What chooses the kinds that are asked for.

    Example:
        >>> found = ask([("star", "red")], ["star", "circle"], np.random.default_rng(0))
        >>> found[0].text, found[0].answers, len(found)
        ('what colour is the star', ('red',), 6)
    """
    kinds, colours = Counter(shape for shape, _ in things), Counter(colour for _, colour in things)
    there, absent = [kind for kind in shapes if kinds[kind]], [kind for kind in shapes if not kinds[kind]]
    draws = random.random(4).tolist()
    found = [(f"what colour is the {shape}", colour) for shape, colour in things if kinds[shape] == 1]
    found += [(f"what shape is the {colour} thing", shape) for shape, colour in things if colours[colour] == 1]
    found.append((f"is there a {there[int(draws[0] * len(there))]}", "yes"))
    found.append((f"is there a {absent[int(draws[1] * len(absent))]}", "no"))
    counted = (there if draws[2] < 0.75 else absent)[int(draws[3] * len(there if draws[2] < 0.75 else absent))]
    found.append((f"how many {_plural(counted)} are there", str(kinds[counted])))
    found.append(("how many shapes are there", str(len(things))))
    return tuple(Question(text, (answer,)) for text, answer in found)


def _plural(shape: str) -> str:
    return f"{shape}es" if shape.endswith("s") else f"{shape}s"
