"""Files: atomic writes, errors as sentences, and plain data read from YAML and JSON.

What comes from outside comes in here, and nowhere else: `find_path` for paths that a user wrote, `read_text` for text
files, `read_yaml`, `read_json_file` and `read_json_lines` for plain data, `read_record` for what we wrote ourselves.
They bound size and depth, wait for no pipe, and say in one sentence what is wrong.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from vitclinic._core.errors import DamagedFileError, RecipeError, RunError, VitclinicError

_REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file would be larger than allowed",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "you may not write there",
    errno.EPERM: "you may not write there",
    errno.ENOTDIR: "a part of the path is a file",
    errno.ENOENT: "the folder cannot be created",
    errno.ENAMETOOLONG: "the name is too long",
    errno.EISDIR: "it is a folder",
}
_FOR_WANT_OF_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_OF_THE_MACHINE = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.EIO,
    errno.ELOOP,
}


PAGE_ENDINGS = (".html", ".htm")


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Turn a failed write below `path` into one `RunError` sentence."""
    try:
        yield
    except OSError as error:
        reason = _REASONS.get(error.errno or 0, _reason(error))
        free = "free some space or " if error.errno in _FOR_WANT_OF_SPACE else ""
        raise RunError(
            f"Cannot write '{path}': {reason}. Files written so far are intact; {free}choose another folder (out), then"
            " resume."
        ) from error


@contextmanager
def staged(path: Path) -> Iterator[Path]:
    """Give a file to write to that replaces `path` by one rename at the end, unless an exception ends the writing.

    Only a regular file is replaced: a rename over `/dev/null`, which root may do, would break the machine.

    Raises:
        RunError: The file cannot be written, or is a folder or a device.
    """
    refuse_to_replace(path)
    staging = path.with_name(f".{path.name}.tmp")
    with write_errors(path):
        try:
            yield staging
            sync(staging)
            staging.replace(path)
        finally:
            staging.unlink(missing_ok=True)


def refuse_to_replace(path: Path) -> None:
    """Raise a RunError for anything but a regular file, and for a name that no file can have."""
    if "\0" in str(path):
        raise RunError(f"Cannot write {str(path)!r}: no name has a zero byte; choose another one.")
    with write_errors(path):
        if path.exists() and not path.is_file():
            kind = "a folder" if path.is_dir() else "a device or a pipe"
            raise RunError(f"Cannot write '{path}': it is {kind}, not a file; choose another name.")


def require_ending(path: str | Path, what: str, *endings: str) -> None:
    """Raise a RecipeError unless a file to write is called as its content is, so that a slip replaces no other file.

    Example:
        >>> require_ending("recipe.yaml", "A report is a page", ".html")
        Traceback (most recent call last):
        vitclinic._core.errors.RecipeError: A report is a page: name a file that ends in .html (got 'recipe.yaml').
    """
    if Path(path).suffix.lower() not in endings:
        raise RecipeError(f"{what}: name a file that ends in {' or '.join(endings)} (got '{path}').")


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file by one rename, so that a reader sees the old or the new one, never a partial file."""
    with staged(path) as staging:
        staging.write_bytes(content)


def write_text(path: Path, text: str) -> None:
    """Write text as `write_bytes` does."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, as `write_bytes` does."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def sync(path: Path) -> None:
    """Flush what was written to `path`, a file or a folder, to disk; Windows cannot open folders."""
    if os.name == "nt" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(staging: Path, target: Path, retired: Path) -> None:
    """Make the folder `staging` visible as `target` by one rename; the old `target` becomes `retired`.

    At every moment `target` or `retired` is there and whole.
    """
    if target.exists():  # else a publish was cut off here, and `retired` is all there is
        shutil.rmtree(retired, ignore_errors=True)
        target.rename(retired)
    staging.rename(target)
    sync(target.parent)


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"duplicate key '{key.value}'", problem_mark=key.start_mark)
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else None)
        return node


DAMAGED_ARRAYS = (OSError, ValueError, KeyError, TypeError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)
"""What numpy and zipfile raise for a damaged .npz; RuntimeError for an entry that claims to be encrypted, or packed in
a way that zipfile does not know."""

LARGEST_TEXT = 2**24
"""Bytes of a text file that is read whole; recipes, records and studies are far smaller."""
LARGEST_TABLE = 2**30
"""Bytes of a text file that lists images, with their objects or questions: COCO's own has half as many."""
_DEEPEST, _MOST_NODES = 64, 100_000
"""Levels and values of plain data, with every alias counted as often as it is used."""


def find_path(text: str, error: type[VitclinicError], what: str) -> Path | None:
    """Return the path that a user wrote if something is there, else None; `~` is the home folder.

    Args:
        text: The path.
        error: The error to raise.
        what: What is looked for, in its message.

    Raises:
        VitclinicError: The path cannot be looked at: no permission, too long a name, no such user.
    """
    path = expand_path(text, error)
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as problem:  # ValueError: a NUL byte
        shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
        raise error(f"Cannot look for {what} at {shown!r}: {_reason(problem)}.") from problem
    return path


_SHOWN = 80


def expand_path(text: str, error: type[VitclinicError]) -> Path:
    """Return the path that a user wrote, with the home folder for `~`; an `error` if there is no such user."""
    try:
        return Path(text).expanduser()
    except RuntimeError as problem:
        raise error(f"'{text[:_SHOWN]}' is not a path: no such user; write ./~ for a name with a ~.") from problem


def _reason(problem: Exception) -> str:
    """Return why a file cannot be read, without the path that the sentence has already."""
    if isinstance(problem, UnicodeDecodeError):
        return "it is not UTF-8 text; save it as UTF-8"
    if isinstance(problem, OSError) and problem.strerror:
        return problem.strerror.lower()
    return " ".join(str(problem).split()).rstrip(".") or type(problem).__name__


def refuse_special(path: Path) -> None:
    """Raise an OSError for a pipe or a device, such as `/dev/zero` behind a link: reading it may never end."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def describe_os_error(problem: OSError) -> str | None:
    """Return a sentence for an error of the file system that nobody has foreseen where it happened, else None."""
    if problem.errno not in _OF_THE_MACHINE:
        return None
    file = "A file" if problem.filename is None else f"'{problem.filename}'"
    return f"{file} cannot be read or written: {os.strerror(problem.errno).lower()}."


def read_text(path: Path, error: type[VitclinicError], largest: int = LARGEST_TEXT) -> str:
    """Return the text of a file in UTF-8, with or without a byte order mark.

    Raises:
        VitclinicError: It cannot be read, has more than `largest` bytes, or is not UTF-8; of the class `error`.
    """
    try:
        refuse_special(path)
        if path.stat().st_size > largest:
            raise error(f"'{path}' cannot be read: it has more than {largest // 2**20} MB.")
        return path.read_bytes().decode("utf-8-sig")
    except (OSError, ValueError) as problem:
        raise error(f"'{path}' cannot be read: {_reason(problem)}.") from problem


def read_record(path: Path, fields: Mapping[str, type | tuple[type, ...]], advice: str) -> dict[str, Any]:
    """Return a JSON object of ours, with at least these fields of these types.

    Args:
        path: The file.
        fields: The fields that readers rely on, with their types.
        advice: What to do if the file is damaged, as the end of the sentence.

    Raises:
        DamagedFileError: It cannot be read, is not a JSON object, or has a field of another type.
    """
    text = read_text(path, DamagedFileError)
    try:
        record = read_json(text)
    except ValueError as problem:
        raise DamagedFileError(f"'{path}' is damaged ({_reason(problem)}); {advice}.") from problem
    if not isinstance(record, dict):
        raise DamagedFileError(f"'{path}' is damaged (it holds no JSON object); {advice}.")
    for name, kind in fields.items():
        value = record.get(name)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise DamagedFileError(f"'{path}' is damaged ('{name}' is missing or wrong); {advice}.")
    return record


_QuickLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Ten times as quick, without our checks; for texts of the package."""


def read_our_yaml(text: str) -> Any:
    """Parse YAML that comes with the package, and so is known to be sound."""
    return _numbers(yaml.load(text, Loader=_QuickLoader))


def read_yaml(text: str) -> Any:
    """Parse YAML.

    Raises:
        yaml.YAMLError: It is invalid, has a duplicate key, refers to itself, is nested too deeply, or has aliases that
            stand for more than can be meant.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _count_nodes(node, {}, 0)
        return loader.construct_document(node)
    except RecursionError as error:
        raise yaml.YAMLError("it is nested too deeply") from error
    except (ValueError, OverflowError) as error:  # numbers of thousands of digits, days that do not exist
        raise yaml.YAMLError(str(error)) from error
    finally:
        loader.dispose()


def _count_nodes(node: yaml.Node, counted: dict[int, int], depth: int) -> int:
    """Return how many values a node stands for; 0 marks those that are being counted."""
    if id(node) in counted:
        if not counted[id(node)]:
            raise yaml.YAMLError("it refers to itself")
        return counted[id(node)]
    if depth > _DEEPEST:
        raise yaml.YAMLError("it is nested too deeply")
    counted[id(node)] = 0
    pairs = node.value if isinstance(node, yaml.MappingNode) else ()
    children = node.value if isinstance(node, yaml.SequenceNode) else [child for pair in pairs for child in pair]
    total = 1 + sum(_count_nodes(child, counted, depth + 1) for child in children)
    if total > _MOST_NODES:
        raise yaml.YAMLError(f"it stands for more than {_MOST_NODES:,} values")
    counted[id(node)] = total
    return total


def parse_yaml(text: str, what: str) -> Any:
    """Parse a YAML text; `what` names it in error messages.

    Raises:
        RecipeError: The text is not valid YAML.
    """
    try:
        value = read_yaml(text)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise RecipeError(f"{what} is not YAML: {reason}") from error
    return _numbers(value)


def _numbers(value: Any) -> Any:
    """Convert strings such as `1e-3` to numbers: YAML 1.1 reads them as strings."""
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    if isinstance(value, str) and "e" in value.lower():
        try:
            return float(value)
        except ValueError:
            return value
    return value


def read_json(text: str | bytes) -> Any:
    """Parse JSON; raise a ValueError if it is invalid, nested too deeply or has a duplicate key."""
    try:
        value = json.loads(text, object_pairs_hook=_table)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    _refuse_depth(value)
    return value


def _refuse_depth(value: Any) -> None:
    """Raise a ValueError for what the parser can follow, and code that walks it perhaps not."""
    level = [value]
    for _ in range(_DEEPEST):
        level = [inner for outer in level for inner in _inner(outer) if isinstance(inner, dict | list)]
        if not level:
            return
    raise ValueError("it is nested too deeply")


def _inner(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def read_json_file(path: Path, error: type[VitclinicError], largest: int = LARGEST_TEXT) -> Any:
    """Return what a JSON file holds.

    Raises:
        VitclinicError: It cannot be read, has more than `largest` bytes, or is not JSON; of the class `error`.
    """
    text = read_text(path, error, largest)
    try:
        return read_json(text)
    except ValueError as problem:
        raise error(f"'{path}' is not JSON: {_reason(problem)}.") from problem


def read_json_lines(path: Path, error: type[VitclinicError], expected: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a file of JSON lines, each with what to call it.

    Args:
        path: The file, of at most `LARGEST_TABLE` bytes.
        error: The error to raise.
        expected: What a line should be, in its message.

    Raises:
        VitclinicError: It cannot be read, or a line is not a JSON object; of the class `error`.
    """
    for number, line in enumerate(read_text(path, error, LARGEST_TABLE).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        try:
            row = read_json(line)
        except ValueError as problem:
            raise error(f"{where} is not JSON: {_reason(problem)}.") from problem
        if not isinstance(row, dict):
            raise error(f"{where} is not a JSON object; expected {expected}.")
        yield where, row


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"duplicate key '{key}'")
        found[key] = value
    return found


def fingerprint(*parts: Any) -> str:
    """Return the SHA-256 of plain data, by way of its JSON: a short name for it."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def sign(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record of plain data with a digest of itself, by which `is_unchanged` knows it."""
    return {**record, "digest": fingerprint(record)}


def is_unchanged(record: Mapping[str, Any]) -> bool:
    """Return True if a record is as `sign` returned it, or has no digest, as earlier versions wrote it."""
    rest = {name: value for name, value in record.items() if name != "digest"}
    return record.get("digest") in (None, fingerprint(rest))
