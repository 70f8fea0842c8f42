"""Checkpoints: `model.safetensors` (the network to use), `state.safetensors` (needed to resume) and checksums.

A checkpoint appears with a single rename and is verified against its checksums on reading, and the previous one is
kept: a run that was killed, or whose last checkpoint is damaged, still resumes from an intact one. Nothing is
pickled: nested states are stored as tensors plus a JSON tree that says where each of them goes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from vitclinic._core.errors import DamagedFileError, RunError
from vitclinic._core.io import publish, read_json, read_record, refuse_special, sync, write_errors

log = logging.getLogger(__name__)

_TENSOR = "$tensor"
_FILES = ("model.safetensors", "state.safetensors")


class Checkpoints:
    """The folder `checkpoints/` of a run: last, previous, best and epoch-N."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(
        self,
        names: list[str],
        model: dict[str, Tensor],
        state: dict[str, Any],
        made_with: Mapping[str, str] | None = None,
    ) -> None:
        """Write one checkpoint under each of `names`; the old `last` becomes `previous`.

        Args:
            names: `last`, `best`, `epoch-N`.
            model: The network's weights.
            state: What else a resumed run needs.
            made_with: Digests of the run's files that the weights were made with, by name.
        """
        for name in names:
            with write_errors(self.folder / name):
                staging = self._staging(name)
                try:
                    _write(staging, model, state, made_with or {})
                    publish(staging, self.folder / name, self._backup_path(name))
                finally:
                    shutil.rmtree(staging, ignore_errors=True)
                if name != "last":
                    shutil.rmtree(self._backup_path(name), ignore_errors=True)

    def newest_intact(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Return model and state to resume from: `last`, or `previous` (with a warning) if `last` is damaged.

        A damaged `last` is removed; otherwise the next save would move it over the intact `previous`.

        Raises:
            RunError: There are checkpoints, but all of them are damaged.
        """
        present = [name for name in ("last", "previous") if (self.folder / name).exists()]
        for name in present:
            try:
                found = self.read(name)
            except RunError as error:
                log.warning("%s", error)
                continue
            if name == "previous":
                shutil.rmtree(self.folder / "last", ignore_errors=True)
            return found
        if present:
            raise RunError(f"All checkpoints in '{self.folder}' are damaged; there is nothing to resume from.")
        return None

    def withdraw_last(self, from_step: int) -> bool:
        """Put `previous` back in place of `last` if `last` was written at `from_step` or later, or is damaged.

        Returns:
            Whether there is a `last` from before that step now.
        """
        last, previous = self.folder / "last", self.folder / "previous"
        if last.exists() and self._is_from_before(from_step, "last"):
            return True
        if not previous.exists():
            return False
        shutil.rmtree(last, ignore_errors=True)
        previous.rename(last)
        return self._is_from_before(from_step, "last")

    def _is_from_before(self, step: int, name: str) -> bool:
        try:
            return int(self.read(name)[1]["step"]) < step
        except RunError:
            return False

    def read(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Read the network's weights and the training state of a checkpoint.

        Raises:
            RunError: The checkpoint does not exist or is damaged.
        """
        folder = self._existing(name)
        _verify(folder)
        try:
            return load_file(folder / "model.safetensors"), _read_tree(folder / "state.safetensors")
        except (SafetensorError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise DamagedFileError(f"The checkpoint '{folder}' is damaged ({error}).") from error

    def read_model(self, name: str) -> dict[str, Tensor]:
        """Read only the network's weights."""
        folder = self._existing(name)
        _verify(folder)
        weights: dict[str, Tensor] = load_file(folder / "model.safetensors")
        return weights

    def made_with(self, name: str) -> dict[str, str]:
        """Return the digests of the files that the weights were made with; none of version 0.2 or earlier."""
        folder = self._existing(name)
        _verify(folder)
        try:
            with safe_open(folder / "state.safetensors", framework="pt") as stored:
                found = read_json(stored.metadata().get("made_with", "{}"))
            return {str(file): str(digest) for file, digest in found.items()}
        except (SafetensorError, ValueError, AttributeError, RecursionError) as error:
            raise DamagedFileError(f"The checkpoint '{folder}' is damaged ({error}).") from error

    def model_checksum(self, name: str) -> str:
        """Return the recorded SHA-256 of a checkpoint's `model.safetensors`."""
        return str(_read_checksums(self._existing(name))["model.safetensors"])

    def default(self) -> str:
        """Return the name of the checkpoint to use unless one is named: `best`, or `last` without one."""
        return "best" if "best" in self.names() else "last"

    def names(self) -> list[str]:
        """Return the names of all checkpoints."""
        if not self.folder.is_dir():
            return []
        try:
            folders = [p.name for p in self.folder.iterdir() if p.is_dir()]
        except OSError as error:
            raise RunError(f"'{self.folder}' cannot be read: {str(error.strerror).lower()}.") from error
        cut_off = [name[1:-4] for name in folders if name.startswith(".") and name.endswith(".old")]
        return sorted({name for name in folders if not name.startswith(".")}.union(cut_off))

    def _existing(self, name: str) -> Path:
        if name not in self.names():
            known = ", ".join(self.names()) or "none"
            raise RunError(f"'{self.folder.parent}' has no checkpoint '{name}'; it has {known}.")
        # While it is being replaced, or after a kill halfway through, the old one is there under its backup name.
        return self.folder / name if (self.folder / name).exists() else self._backup_path(name)

    def _backup_path(self, name: str) -> Path:
        return self.folder / ("previous" if name == "last" else f".{name}.old")

    def _staging(self, name: str) -> Path:
        staging = self.folder / f".{name}.new"
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        return staging


def _write(folder: Path, model: dict[str, Tensor], state: dict[str, Any], made_with: Mapping[str, str]) -> None:
    tensors: dict[str, Tensor] = {}
    facts = {"tree": json.dumps(_flatten(state, "", tensors)), "made_with": json.dumps(dict(made_with))}
    try:
        save_file(_storable(model), folder / "model.safetensors")
        save_file(_storable(tensors), folder / "state.safetensors", facts)
    except SafetensorError as error:  # its I/O errors are not OSErrors
        raise RunError(f"Cannot write '{folder.parent}': {error}; earlier checkpoints are intact.") from error
    sums = {file.name: _checksum(file) for file in sorted(folder.glob("*.safetensors"))}
    (folder / "checksums.json").write_text(json.dumps(sums))
    for file in folder.iterdir():
        sync(file)


def _storable(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous CPU tensors that share no memory, as safetensors requires."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().to("cpu").contiguous()
        if tensor.untyped_storage().data_ptr() in seen or tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensor = tensor.clone()
        seen.add(tensor.untyped_storage().data_ptr())
        result[name] = tensor
    return result


def _verify(folder: Path) -> None:
    sums = _read_checksums(folder)
    try:
        damaged = [name for name, checksum in sums.items() if _checksum(folder / name) != checksum]
    except (OSError, ValueError) as error:
        raise DamagedFileError(f"The checkpoint '{folder}' is damaged ({error}).") from error
    if damaged or set(sums) != set(_FILES):
        raise DamagedFileError(f"The checkpoint '{folder}' is damaged ({', '.join(damaged) or 'files are missing'}).")


def _read_checksums(folder: Path) -> dict[str, Any]:
    return read_record(folder / "checksums.json", dict.fromkeys(_FILES, str), "use another checkpoint")


def _checksum(file: Path) -> str:
    refuse_special(file)
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _flatten(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Convert a nested state to JSON data, moving its tensors to `tensors`."""
    if isinstance(value, Tensor):
        tensors[path] = value
        return {_TENSOR: path}
    if isinstance(value, dict):
        keys = [[key, _flatten(item, f"{path}/{key}", tensors)] for key, item in value.items()]
        return {"$dict": keys}  # as pairs: JSON would turn an optimizer's integer keys into strings
    if isinstance(value, list | tuple):
        return [_flatten(item, f"{path}/{number}", tensors) for number, item in enumerate(value)]
    return value


def _unflatten(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_unflatten(item, tensors) for item in value]
    if isinstance(value, dict):
        if _TENSOR in value:
            return tensors[value[_TENSOR]]
        return {key: _unflatten(item, tensors) for key, item in value["$dict"]}
    return value


def _read_tree(file: Path) -> dict[str, Any]:
    with safe_open(file, framework="pt") as stored:
        tree = read_json(stored.metadata()["tree"])
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 (not a dict)
    restored: dict[str, Any] = _unflatten(tree, tensors)
    return restored


def load_network_state(network: torch.nn.Module, state: dict[str, Tensor], where: str) -> None:
    """Load stored weights into a network.

    Args:
        network: The network, changed in place.
        state: The weights by name.
        where: The run they come from, for the error message.

    Raises:
        RunError: Names or shapes do not match.
    """
    try:
        network.load_state_dict(state)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise RunError(f"The weights of {where} do not fit its recipe's network: {reason}") from error
