"""Sentences of ours that quote another error."""

import pytest

from vitclinic._core.errors import first_line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("Expected 3 channels.\nGot 4."), "Expected 3 channels"),
        (ValueError("\n  far in \n"), "far in"),
        (RuntimeError(), "RuntimeError"),
        (OSError(" \n"), "OSError"),
    ],
)
def test_the_first_line_of_an_error_has_no_full_stop_and_is_never_empty(error, line):
    assert first_line(error) == line
