"""`late_drop_path`: rates as a function of the step, in runs that stop and go on, for networks of several libraries."""

import pytest
import torch
import torchvision
from transformers import SwinConfig, SwinModel

from tests.rows import drop_timing
from vitclinic._core.callback import Callback
from vitclinic._core.distributed import ALONE
from vitclinic._core.errors import RecipeError
from vitclinic.data import open_data
from vitclinic.training import build_recipe, resume, train
from vitclinic.training.drop_path import LateDropPath, LateDropPathConfig, find_drop_paths
from vitclinic.training.trainer import Trainer

DEEP = {
    "data": {"source": "digits", "limit": 60},
    "model": {"name": "vit_tiny_fitted", "embed_dim": 24, "depth": 4, "num_heads": 2, "drop_path_rate": 0.3},
    "late_drop_path": 0.5,
    "batch_size": 16,
    "steps": 10,
    "checkpoint": "1 steps",
}


class RatesSeen(Callback):
    """The rates of every step, and the end of a run after some."""

    def __init__(self, last=None):
        self.seen, self.last = [], last

    def on_train_start(self, trainer):
        trainer.network.register_forward_pre_hook(self.note)

    def note(self, network, args):
        if network.training:
            self.seen.append([round(rate, 6) for _, _, rate in find_drop_paths(network)])

    def on_step(self, trainer):
        if trainer.step == self.last:
            raise KeyboardInterrupt


def test_the_last_fifth_has_the_late_rate_and_a_resumed_run_the_same_bits(tmp_path):
    whole, first, second = RatesSeen(), RatesSeen(last=9), RatesSeen()
    run = train({**DEEP, "out": str(tmp_path / "whole")}, callbacks=[whole])
    early, late = ([round(top * block / 3, 6) for block in (1, 2, 3) for _ in range(2)] for top in (0.3, 0.5))
    assert whole.seen == [early] * 8 + [late] * 2
    with pytest.raises(KeyboardInterrupt):
        train({**DEEP, "out": str(tmp_path / "stopped")}, callbacks=[first])
    resumed = resume(tmp_path / "stopped", callbacks=[second])
    assert first.seen[:8] + second.seen == whole.seen  # the step that was interrupted is made again
    assert drop_timing(run.metrics) == drop_timing(resumed.metrics)


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.5])
def test_the_late_rate_is_that_of_a_network_built_with_it(tmp_path, rate):
    """What blocks compute in the last part is what they compute in a run that has the late rate from the start."""
    losses = []
    for early, late in ((0.3, {"rate": rate, "share": 0.999}), (rate, {})):
        plain = build_recipe({**DEEP, "model": {**DEEP["model"], "drop_path_rate": early}, "late_drop_path": late})
        trainer = Trainer(plain, open_data(plain.data), 10, ALONE, torch.device("cpu"))
        trainer.step = 1
        losses.append([trainer.advance()["loss"] for _ in range(2)])
    assert losses[0] == losses[1]


def test_rates_of_other_libraries_are_found():
    theirs = torchvision.models.swin_t()
    faces = SwinModel(SwinConfig(image_size=32, patch_size=4, embed_dim=8, depths=[2, 2], num_heads=[1, 1]))
    for network in (theirs, faces):
        before = [rate for _, _, rate in find_drop_paths(network)]
        LateDropPath(LateDropPathConfig(rate=0.5), network)(0.9)
        after = [rate for _, _, rate in find_drop_paths(network)]
        assert max(after) == 0.5
        assert after == pytest.approx([rate * 0.5 / max(before) for rate in before])


def test_a_network_without_dropped_paths_is_told(tmp_path):
    model = {**DEEP["model"], "drop_path_rate": 0.0}
    with pytest.raises(RecipeError, match=r"late_drop_path .* set model\.drop_path_rate"):
        train({**DEEP, "model": model, "out": str(tmp_path / "run")})
    with pytest.raises(RecipeError, match="'share' has no effect without a 'rate'"):
        build_recipe({"late_drop_path": {"share": 0.3}})
