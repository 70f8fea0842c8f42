"""Names of users' are texts for plotly, never markup."""

import html

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitclinic.reports.figure import escape_plotly


@given(st.text())
def test_nothing_is_left_that_plotly_would_interpret(text):
    shown = escape_plotly(text)
    assert not set("<>$%\n\r\t") & set(shown)
    assert html.unescape(shown).replace(" ", "") == "".join(
        character for character in text.encode("utf-8", "replace").decode() if character.isprintable()
    ).replace(" ", "")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("vit-tiny", "vit-tiny"),
        ("<script>alert(1)</script>", "&lt;script&gt;alert(1)&lt;/script&gt;"),
        ("50%{x}", "50&#37;{x}"),
        ("&lt;", "&amp;lt;"),
        ("$x$", "&#36;x&#36;"),
        ("two\nlines", "two lines"),
        ("caf\udce9", "caf?"),
        (3, "3"),
    ],
)
def test_names_are_shown_as_they_were_written(text, shown):
    assert escape_plotly(text) == shown
