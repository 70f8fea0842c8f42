"""The weights that a run went through, for the probes that ask for them."""

from __future__ import annotations

import re
from functools import partial

import numpy as np
from numpy.typing import NDArray

from vitclinic.data.source import fingerprint
from vitclinic.probes import PastWeights
from vitclinic.training import Run
from vitclinic.training.trajectory import read_projections


def past_weights(run: Run) -> PastWeights:
    """Those of the checkpoints epoch-N and of `last`, and the projections of `logging.trajectory`."""
    names = {float(match[1]): name for name in run.checkpoints.names() if (match := re.fullmatch(r"epoch-(\d+)", name))}
    if "last" in run.checkpoints.names():
        names[_epochs_done(run)] = "last"
    names = dict(sorted(names.items()))

    def digest() -> str:
        checksums = [run.checkpoints.model_checksum(name) for name in names.values()]
        return fingerprint(checksums, {step: row.tolist() for step, (_, row) in read_projections(run.path).items()})

    return PastWeights(
        weights={epoch: partial(run.checkpoints.read_model, name) for epoch, name in names.items()},
        projections=partial(_projections, run),
        digest=digest,
        finished=run.status["status"] == "finished",
    )


def _epochs_done(run: Run) -> float:
    """How many epochs the checkpoint `last` has seen."""
    return float(run.status["step"] * run.recipe.batch_size / run.data_facts["counts"]["train"])


def _projections(run: Run) -> dict[float, NDArray[np.float64]]:
    return dict(read_projections(run.path).values())
