"""The temperature of a run's softmax: fitted on its val images, once for each checkpoint, and stored with the run."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitclinic._core.callback import Callback
from vitclinic._core.errors import DamagedFileError, DataError, RunError, VitclinicError
from vitclinic._core.io import is_unchanged, read_record, sign, write_json
from vitclinic.data import evaluation_batches, open_data
from vitclinic.exam.targets import Network
from vitclinic.functional import expected_calibration_error, fit_temperature, softmax_loss
from vitclinic.probes.behaviour.predictions import check_logits
from vitclinic.probes.digest import network_digest
from vitclinic.training import Run

log = logging.getLogger(__name__)

CALIBRATION = "calibration.json"
_BATCH_SIZE = 64
_NOISE = 0.01
"""A rise of the calibration error that is worth a warning."""


def calibrate(target: Network, network: nn.Module, device: torch.device, callback: Callback) -> dict[str, Any]:
    """Return the temperature that fits a run's val images, with what it does; it is fitted once, and stored.

    Without val images, or where the data is gone, the temperature is 1 and the record says why.
    """
    run = target.run
    assert run is not None
    file, key = run.path / CALIBRATION, network_digest(target.network)[:16]
    stored = read_calibration(file)
    if key not in stored:
        try:
            stored[key] = _fit(run, network, device, callback)
        except VitclinicError as error:
            log.warning("Probabilities are not calibrated: %s", error)
            return {"temperature": 1.0, "reason": str(error)}
        try:
            write_json(file, sign(stored))
        except RunError as error:  # another's run can be read, too
            log.warning("%s", error)
    return stored[key]


def read_calibration(file: Path) -> dict[str, dict[str, Any]]:
    """Return the stored temperatures by the digest of the weights; none if the file is not there or damaged."""
    if not file.is_file():  # none yet
        return {}
    try:
        stored = read_record(file, {}, "it is fitted again")
        if not is_unchanged(stored):
            raise DamagedFileError(f"'{file}' was changed since it was written; it is fitted again.")
    except DamagedFileError as error:
        log.warning("%s", error)
        return {}
    known = {key: record for key, record in stored.items() if isinstance(record, dict)}
    numbers = ("temperature", "nll")  # those before the loss was noted were fitted with too many pseudo-counts
    return {
        key: record for key, record in known.items() if all(isinstance(record.get(n), int | float) for n in numbers)
    }


@torch.inference_mode()
def _fit(run: Run, network: nn.Module, device: torch.device, callback: Callback) -> dict[str, Any]:
    spec = run.spec
    dataset = open_data(run.recipe.data, size=spec.img_size, channels=spec.in_chans, progress=callback.on_progress)
    if dataset.digest != run.data_facts["digest"]:
        raise DataError(f"The data of '{run.path}' has changed since it was trained.")
    if not len(dataset.val):
        raise DataError(f"'{dataset.name}' has no val images.")
    logits = []
    for batch in evaluation_batches(dataset, "val", _BATCH_SIZE):
        logits.append(check_logits(network(batch.images.to(device)), str(run.path)).cpu())
        callback.on_progress("calibrating", sum(map(len, logits)), len(dataset.val))
    z, y = torch.cat(logits), torch.from_numpy(dataset.val.labels)
    return choose_temperature(z, y, f"'{run.path}'")


def choose_temperature(logits: Tensor, targets: Tensor, name: str) -> dict[str, Any]:
    """Return the record of the temperature that fits some labels, or of 1 if their loss is no lower with it.

    Args:
        logits: [B, K].
        targets: Class indices [B].
        name: Of the network, for messages.
    """
    temperature, kept = fit_temperature(logits, targets), {}
    before, after = (float(softmax_loss(logits / t, targets)) for t in (1.0, temperature))
    if after > before:  # the pseudo-count of a fit to few images, which are all right
        kept["reason"] = (
            f"at {temperature:.3g}, the loss of the val images would rise from {before:.3g} to {after:.3g}."
        )
        temperature, after = 1.0, before
        log.warning("%s keeps the temperature 1: %s", name, kept["reason"])
    ece_before, ece = (expected_calibration_error(logits / t, targets) for t in (1.0, temperature))
    if ece > ece_before + _NOISE:
        log.warning(
            "%s: the temperature %.3g lowers the loss of the val images, and yet their calibration error rises from"
            " %.3f to %.3f; --temperature 1 leaves probabilities as they were trained.",
            *(name, temperature, ece_before, ece),
        )
    errors = {"ece": ece, "ece_before": ece_before, "nll": after, "nll_before": before}
    return {"temperature": temperature, "images": len(targets), **errors, **kept}
