"""What users have named, made safe for plotly, whose labels are a small HTML of their own.

The page's templates escape for themselves; plotly's texts (legends, axis labels, hover boxes, annotations) go through
here. Tables, captions, titles and everything else that is not plotly's stay as the user wrote them.
"""

from __future__ import annotations

import re

_MEANT_BY_PLOTLY = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "$": "&#36;", "%": "&#37;"}
"""Entities and tags; formulas between dollars; `%{...}` in hover templates."""


def plain(text: object) -> str:
    """`text` in one line, so that plotly shows it as it is wherever it takes a text, also inside a hover template.

    Example:
        >>> plain("<b>%{x}</b> & more")
        '&lt;b&gt;&#37;{x}&lt;/b&gt; &amp; more'
    """
    line = " ".join(str(text).encode("utf-8", "replace").decode().split())
    visible = "".join(character for character in line if character == " " or character.isprintable())
    return re.sub("[&<>$%]", lambda found: _MEANT_BY_PLOTLY[found[0]], visible)
