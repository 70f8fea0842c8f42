"""The one door: what comes from outside is read with limits of size, depth and encoding, or is a sentence."""

import ast
import json
import os
from pathlib import Path

import pytest

import vitclinic
from vitclinic._core import io
from vitclinic._core.errors import DamagedFileError, DataError, RunError
from vitclinic._core.io import read_json, read_json_file, read_json_lines, read_record, refuse_to_replace

SOURCES = Path(vitclinic.__file__).parent
DEEP = "[" * 65 + "]" * 65
"""Deeper than anything is meant, and shallow enough for Python's own parser."""


@pytest.mark.parametrize("text", ["[" * 200_000, DEEP, '{"a": ' * 70 + "1" + "}" * 70])
def test_deep_json_is_refused_however_deep(text):
    with pytest.raises(ValueError, match="nested too deeply"):
        read_json(text)


def test_depth_is_of_nesting_not_of_length():
    assert read_json(json.dumps([[[1], {"a": [2]}]] * 1000))[999] == [[1], {"a": [2]}]
    assert read_json("[" * 64 + "]" * 64)


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "missing", "loop"])
def test_what_is_no_file_is_told_at_once(kind, tmp_path, ends_soon):
    path = tmp_path / "file.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    for read in (read_json_file, lambda path, error: list(read_json_lines(path, error, "rows"))):
        with pytest.raises(DataError, match=r"^'.*file\.json' cannot be read: .*\.$"):
            read(path, DataError)
    with pytest.raises(DamagedFileError, match="cannot be read"):
        read_record(path, {}, "make it again")


@pytest.mark.parametrize("content", [b"", b"\xff\xfe{}", b"{" * 100_000, b'{"a": 1, "a": 2}', b"9" * 6000, b"nul"])
def test_what_is_no_json_is_one_sentence(content, tmp_path):
    path = tmp_path / "file.json"
    path.write_bytes(content)
    with pytest.raises(DataError) as told:
        read_json_file(path, DataError)
    assert str(told.value).startswith(f"'{path}' ")
    assert "\n" not in str(told.value)


def test_a_file_may_have_so_many_bytes(tmp_path, monkeypatch):
    path = tmp_path / "file.json"
    path.write_text(f'"{"x" * 2000}"')
    assert len(read_json_file(path, DataError)) == 2000
    with pytest.raises(DataError, match="more than"):
        read_json_file(path, DataError, largest=1000)
    monkeypatch.setattr(io, "LARGEST_TABLE", 1000)
    with pytest.raises(DataError, match="more than"):
        list(read_json_lines(path, DataError, "rows"))


def test_lines_are_named_and_may_hold_any_character(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": "x\u2028y"}\r\n\n{"a": 2}\n', encoding="utf-8", newline="")
    rows = list(read_json_lines(path, DataError, "rows"))
    assert rows == [(f"{path} line 1", {"a": "x\u2028y"}), (f"{path} line 3", {"a": 2})]
    for line in ("[1]", "{", "[" * 200_000):
        path.write_text(f'{{"a": 1}}\n{line}\n')
        with pytest.raises(DataError, match="line 2"):
            list(read_json_lines(path, DataError, "rows"))


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000])
def test_a_name_that_no_file_can_have_is_not_written(name, tmp_path):
    with pytest.raises(RunError, match="Cannot write"):
        refuse_to_replace(tmp_path / name)
    with pytest.raises(RunError, match="Cannot write"):
        io.write_text(tmp_path / name, "")
    with pytest.raises(RunError, match="it is a folder"):
        io.write_text(Path("/"), "")


PARSERS = {"json.load", "json.loads", "np.load", "yaml.load", "yaml.safe_load", "torch.load", "pickle.load"}
KNOWN = {
    "_core/io.py": "the door",
    "data/cache.py": "an entry whose content is compared with its digest",
    "data/named.py": "the digits that come with the package",
    "training/callbacks.py": "arrays; damage is caught there",
    "probes/guards.py": "arrays; damage is caught there",
    "models/weights.py": "tensors alone, of pickles",
    "deployment/card.py": "a file that was written a moment before",
    "reports/frame.py": "text of plotly's",
    "exam/commands.py": "a value that is compared with itself",
    "experiments/study/catalogue.py": "a file of the package",
    "experiments/study/costs.py": "a recipe that was made a moment before",
}
"""Where something else than the door parses files or texts, and why."""


def test_there_is_no_other_door():
    found = {}
    for file in sorted(SOURCES.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in PARSERS and not copies_plain_data(node):
                found.setdefault(str(file.relative_to(SOURCES)), []).append(node.lineno)
    assert {name: lines for name, lines in found.items() if name not in KNOWN} == {}


def copies_plain_data(call):
    """Return True for `json.loads(json.dumps(...))`."""
    given = call.args[0]
    return isinstance(given, ast.Call) and ast.unparse(given.func) == "json.dumps"
