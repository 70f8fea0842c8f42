"""Damage to files: bytes, structure, encoding, and what a file is."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

LIMIT = 2**16
"""Places of a large file at which damage begins are drawn from its first and last so many bytes."""


def flip_bits(content: bytes, draw: random.Random) -> bytes:
    """Change up to eight bits."""
    changed = bytearray(content)
    for _ in range(draw.randint(1, 8) if content else 0):
        changed[_place(content, draw)] ^= 1 << draw.randrange(8)
    return bytes(changed)


def truncate(content: bytes, draw: random.Random) -> bytes:
    """Cut the end off, as a full disk does."""
    return content[: _place(content, draw)]


def blank(content: bytes, draw: random.Random) -> bytes:
    """Replace a part by zeros, as a file system does that lost its journal."""
    start = _place(content, draw)
    length = draw.choice([1, 16, 512, 4096])
    return content[:start] + bytes(len(content[start : start + length])) + content[start + length :]


def repeat(content: bytes, draw: random.Random) -> bytes:
    """Write a part twice."""
    start = _place(content, draw)
    return content[:start] + content[max(0, start - draw.choice([1, 7, 100])) :]


def insert(content: bytes, draw: random.Random) -> bytes:
    """Put something foreign in the middle."""
    start = _place(content, draw)
    foreign = [
        b"\0",
        b"\xff\xfe",
        b"<<<<<<< HEAD\n",
        "ü€😀".encode(),
        b"\r\n",
        b"'",
        b'"',
        b"{",
        b"]",
        b"- ",
        b": ",
        b"\t",
    ]
    return content[:start] + draw.choice(foreign) + content[start:]


def replace_all(content: bytes, draw: random.Random) -> bytes:
    """Put something else in its place."""
    others = [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"0",
        b'"text"',
        b"\x80\x04N.",
        b"PK\x03\x04",
        b"[" * 50_000,
        bytes(range(256)),
    ]
    return draw.choice([*others, b"9" * 6000, b"&a [*a]", b"a: &a {b: *a}", b"<html></html>", bytes(len(content))])


def reencode(content: bytes, draw: random.Random) -> bytes:
    """Save the text in another encoding, or with a mark at its front."""
    text = content.decode("latin-1")
    return draw.choice([text.encode("utf-16"), text.encode("utf-32"), b"\xef\xbb\xbf" + content, b"\xff" + content])


BYTES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "bits flipped": flip_bits,
    "cut off": truncate,
    "zeros": blank,
    "written twice": repeat,
    "foreign bytes": insert,
    "another content": replace_all,
    "another encoding": reencode,
}

STRANGE: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        2**31,
        2**63,
        -(2**63),
        10**30,
        0.5,
        -0.5,
        1e308,
        1e-308,
        float("nan"),
        float("inf"),
    ),
    *(
        "",
        " ",
        "x",
        "null",
        "nan",
        "-1",
        "../..",
        "/dev/null",
        "a\0b",
        "ü" * 300,
        "x" * 5000,
        "%s{}",
        "\x1b[31m",
        "=",
        "@",
    ),
    *([], {}, [None], [[]], {"": {}}, {"x": 1}, [1, "a", None], ["x"] * 200, {"name": "x"}),
]
"""Values of every type, that somebody has typed somewhere."""


def change_value(plain: Any, draw: random.Random) -> Any:
    """Return nested plain data with one value replaced, removed or added."""
    if isinstance(plain, dict) and plain and draw.random() < 0.85:
        key = draw.choice(list(plain))
        what = draw.random()
        if what < 0.6:
            return {**plain, key: change_value(plain[key], draw)}
        if what < 0.75:
            return {name: value for name, value in plain.items() if name != key}
        if what < 0.85:
            return {(f"{name}x" if name == key else name): value for name, value in plain.items()}
        return {
            **plain,
            draw.choice(["", "x", "Seed", key.upper() if isinstance(key, str) else "y"]): draw.choice(STRANGE),
        }
    if isinstance(plain, list) and plain and draw.random() < 0.8:
        index = draw.randrange(len(plain))
        return [*plain[:index], change_value(plain[index], draw), *plain[index + draw.randint(0, 1) :]]
    return draw.choice(STRANGE)


def nudge(plain: Any, draw: random.Random) -> Any:
    """Return nested plain data with one value replaced by one of its own kind: valid, and wrong."""
    if isinstance(plain, dict) and plain:
        key = draw.choice(list(plain))
        return {**plain, key: nudge(plain[key], draw)}
    if isinstance(plain, list) and len(plain) > 1 and draw.random() < 0.5:
        return plain[::-1]
    if isinstance(plain, list) and plain:
        index = draw.randrange(len(plain))
        return [*plain[:index], nudge(plain[index], draw), *plain[index + 1 :]]
    if isinstance(plain, bool):
        return not plain
    if isinstance(plain, int | float):
        return draw.choice([plain + 1, -plain, 2 * plain, 0 * plain, plain + 10**9])
    return f"{plain}x" if isinstance(plain, str) else plain


def deepen(plain: Any, draw: random.Random) -> Any:
    """Return nested plain data with one value a hundred levels deep: more than is meant, less than a parser refuses."""
    if isinstance(plain, dict) and plain:
        key = draw.choice(list(plain))
        return {**plain, key: deepen(plain[key], draw)}
    for _ in range(100):
        plain = draw.choice([[plain], {"x": plain}])
    return plain


EDITS: dict[str, Callable[[Any, random.Random], Any]] = {"nudged": nudge, "deepened": deepen}


def edit_json(path: Path, draw: random.Random) -> str:
    """Change one value of a JSON file such that it is JSON still; return in words how."""
    kind = draw.choice([*EDITS, "a hundred thousand brackets"])
    changed = None if kind not in EDITS else EDITS[kind](json.loads(path.read_bytes()), draw)
    path.write_text("[" * 100_000 if kind not in EDITS else json.dumps(changed))
    return kind


def change_text(path: Path, content: bytes, draw: random.Random) -> bytes:
    """Return a JSON or YAML file with one value changed, as an edit by hand does."""
    if path.suffix == ".yaml":
        return yaml.safe_dump(change_value(yaml.safe_load(content), draw), sort_keys=False).encode()
    if path.suffix == ".jsonl":
        lines = content.splitlines()
        line = draw.randrange(len(lines))
        lines[line] = json.dumps(change_value(json.loads(lines[line]), draw)).encode()
        return b"\n".join(lines) + b"\n"
    return json.dumps(change_value(json.loads(content), draw)).encode()


def make_strange(path: Path, draw: random.Random) -> str:
    """Put something that is no regular file, or none that may be read, in the place of a file; return what it is."""
    kinds = ["missing", "folder", "link to itself", "broken link", "pipe", "link to a device", "empty"]
    kind = draw.choice(kinds)
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "link to itself":
        path.symlink_to(path)
    elif kind == "broken link":
        path.symlink_to("nowhere")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "link to a device":
        path.symlink_to(draw.choice(["/dev/zero", "/dev/null", "/dev/full"]))
    elif kind == "empty":
        path.touch()
    return kind


TEXTS = (".json", ".yaml", ".jsonl")


def damage(path: Path, draw: random.Random) -> str:
    """Damage one file; return in words how."""
    kinds = [*BYTES, "no file", *["a value changed"] * (4 if path.suffix in TEXTS else 0)]
    kind = draw.choice(kinds)
    if kind == "no file":
        return make_strange(path, draw)
    content = path.read_bytes()
    path.write_bytes(change_text(path, content, draw) if kind == "a value changed" else BYTES[kind](content, draw))
    return kind


def _place(content: bytes, draw: random.Random) -> int:
    """Return a place in a file, near its ends if it is large: that is where headers are."""
    if len(content) < 2:
        return 0
    if len(content) <= 2 * LIMIT or draw.random() < 0.5:
        return draw.randrange(len(content))
    near = draw.randrange(LIMIT)
    return near if draw.random() < 0.5 else len(content) - 1 - near
