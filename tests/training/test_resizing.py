"""Progressive resizing: which size each step has, what shrinks with it, and what does not change."""

import json
import signal
from dataclasses import replace

import numpy as np
import pytest
import timm
import torch
from hypothesis import given
from hypothesis import strategies as st
from timm.layers import resample_abs_pos_embed

from tests.rows import drop_timing
from tests.training.test_resume import start, wait_for_step
from vitclinic._core.callback import Callback
from vitclinic._core.distributed import ALONE
from vitclinic._core.errors import ModelError, RecipeError
from vitclinic.data import Batch, ImageSpec, open_data
from vitclinic.models import create_model
from vitclinic.models.input_sizes import find_multiple
from vitclinic.training import Run, build_recipe, load_model, resume, train
from vitclinic.training.budget import measure_cost
from vitclinic.training.network import create_network
from vitclinic.training.resizing import ResizingConfig, choose_sizes, shrink
from vitclinic.training.trainer import Trainer

CPU = torch.device("cpu")


class SizesSeen(Callback):
    """The size of every image that a network sees, in training and in evaluation."""

    def __init__(self):
        self.train, self.evaluation = [], set()

    def on_train_start(self, trainer):
        for network in {trainer.network, trainer.evaluation_network}:
            network.register_forward_pre_hook(self.note)

    def note(self, network, args):
        size = tuple(args[0].shape[-2:])
        if network.training:
            self.train.append(size)
        else:
            self.evaluation.add(size)


def trainer_of(recipe, steps=10):
    return Trainer(build_recipe(recipe), open_data(build_recipe(recipe).data), steps, ALONE, CPU)


@given(
    st.floats(0.1, 0.99), st.integers(1, 5), st.sampled_from(["70%", "100%", 2, "13 steps", "0%"]), st.integers(1, 200)
)
def test_every_step_has_one_size_and_sizes_grow(first, stages, until, total):
    config = ResizingConfig(start=first, stages=stages, until=until)
    lengths = config.lengths(steps_per_epoch=7.5, total_steps=total)
    assert len(lengths) == stages + 1
    assert sum(lengths) == total
    assert min(lengths) >= 0
    assert config.shares == sorted(config.shares)
    assert config.shares[0] == first
    if until == "70%":
        assert 0 <= sum(lengths[:-1]) - 0.7 * total < 1


def test_the_network_sees_small_images_then_full_ones_and_is_evaluated_at_full_size(tiny):
    seen = SizesSeen()
    resizing = {"start": 0.25, "until": "60%", "stages": 3}
    run = train(tiny(steps=10, accumulate=2, progressive_resizing=resizing, ema=0.9), callbacks=[seen])
    expected = [(2, 2)] * 2 + [(4, 4)] * 2 + [(6, 6)] * 2 + [(8, 8)] * 4
    assert seen.train == [size for size in expected for _ in range(2)]
    assert seen.evaluation == {(8, 8)}
    assert [tuple(row["img_size"]) for row in run.metrics if row["kind"] == "train"] == expected
    assert load_model(run.path)(torch.rand(1, 1, 8, 8)).shape == (1, 10)


def test_a_run_without_it_is_as_it_was(tiny):
    recipe = build_recipe(tiny())
    assert "progressive_resizing" not in recipe.plain()
    assert recipe.digest("data") == build_recipe(tiny(progressive_resizing=1.0)).digest("data")
    assert recipe.digest("data") != build_recipe(tiny(progressive_resizing=0.5)).digest("data")
    trainer = trainer_of(tiny())
    assert trainer.sizes.sizes == [(8, 8)]
    assert not trainer.network.backbone.dynamic_img_size
    assert "img_size" not in trainer.advance()


def test_a_resolved_recipe_reads_back(tiny):
    recipe = build_recipe(tiny(progressive_resizing=0.5))
    assert recipe.progressive_resizing == ResizingConfig(start=0.5, until="70%", stages=1)
    assert build_recipe(recipe.model_dump(mode="json")).progressive_resizing == recipe.progressive_resizing
    off = build_recipe(tiny())
    assert build_recipe(off.model_dump(mode="json")) == off


def test_callbacks_and_displays_are_told_the_sizes(tiny):
    notices = trainer_of(tiny(progressive_resizing={"start": 0.5, "until": "4 steps"})).notices
    assert notices == ["training images have 4 x 4 pixels from step 1, 8 x 8 pixels from step 5 (progressive_resizing)"]


@pytest.mark.parametrize("keywords", [{}, {"class_token": True, "global_pool": "token"}, {"no_embed_class": True}])
def test_position_embeddings_are_resampled_in_the_forward_pass_as_timm_does(tiny, keywords):
    """Against a ViT of the smaller size whose position embedding is what timm's own function makes of the large one."""
    model = {**tiny()["model"], **keywords}
    spec = ImageSpec(10, 1, (8, 8))
    network = create_network(build_recipe(tiny(model=model, progressive_resizing=0.5)), spec).eval()
    plain = create_network(build_recipe(tiny(model=model)), spec).eval()
    images = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    weights = network.state_dict()
    assert weights.keys() == plain.state_dict().keys()
    assert all(torch.equal(value, weights[name]) for name, value in plain.state_dict().items())
    assert torch.equal(network(images), plain(images))

    small = shrink(Batch(images, *[torch.zeros(3, dtype=torch.int64)] * 3), (4, 4)).images
    twin = create_network(build_recipe(tiny(model=model)), replace(spec, img_size=(4, 4))).eval()
    prefix = 0 if network.backbone.no_embed_class else network.backbone.num_prefix_tokens
    full = network.backbone.pos_embed
    resampled = resample_abs_pos_embed(full, new_size=[2, 2], old_size=[4, 4], num_prefix_tokens=prefix)
    twin.load_state_dict({**weights, "backbone.pos_embed": resampled.detach()})
    torch.testing.assert_close(network(small), twin(small), rtol=0, atol=1e-6)

    network(small).square().sum().backward()
    assert full.grad.shape == full.shape
    assert full.grad[:, prefix:].abs().sum(-1).min() > 0  # every place of the full grid learns from small images


@pytest.mark.parametrize(
    ("name", "keywords"),
    [
        ("swin_tiny_patch4_window7_224", {"embed_dim": 12, "depths": (1, 1), "num_heads": (2, 2), "window_size": 4}),
        ("resnet18", {"channels": [4, 4, 8, 8]}),
        ("alternet18", {"stem": "cifar", "channels": [8, 8, 8, 16], "heads": [1, 1, 2, 2], "head_width": 4}),
    ],
)
def test_networks_of_other_kinds_take_smaller_images(tiny, name, keywords):
    recipe = build_recipe(tiny(model={"name": name, **keywords}, progressive_resizing=0.5))
    spec = ImageSpec(10, 3, (32, 32))
    network = create_network(recipe, spec)
    assert choose_sizes(recipe.progressive_resizing.shares, network, spec) == [(16, 16), (32, 32)]
    plain = create_network(build_recipe(tiny(model={"name": name, **keywords})), spec)
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(network.eval()(images), plain.eval()(images))


def cut_off(recipe, step):
    """Train, lose power in the given step, and resume."""

    class Stop(Callback):
        def on_step(self, trainer):
            if trainer.step == step:
                raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        train(recipe, callbacks=[Stop()])
    return resume(recipe["out"])


def same_bits(first, second):
    assert drop_timing(first.metrics) == drop_timing(second.metrics)
    assert first.results == second.results
    (model, state), (theirs, their_state) = first.checkpoints.read("last"), second.checkpoints.read("last")
    assert all(torch.equal(value, theirs[name]) for name, value in model.items())
    for index, entry in state["optimizer"]["state"].items():
        assert all(torch.equal(v, their_state["optimizer"]["state"][index][k]) for k, v in entry.items())


CUT = {
    "steps": 9,
    "accumulate": 2,
    "ema": 0.9,
    "checkpoint": "1 steps",
    "validation": "4 steps",
    "data": {"source": "digits", "limit": 200, "augment": "deit"},
    "progressive_resizing": {"start": 0.5, "until": "4 steps"},
    "treatments": ["patch_dropout", "sam"],
    "workers": 0,
}


def test_resuming_before_at_and_after_the_switch_gives_the_same_bits(tiny, tmp_path):
    whole = train(tiny(**CUT, out=str(tmp_path / "whole")))
    for step in (4, 5, 6):  # whose work is lost: it goes on behind step 3, 4 and 5
        same_bits(whole, cut_off(tiny(**CUT, out=str(tmp_path / f"cut-{step}")), step))


@pytest.mark.slow
def test_killed_around_the_switch(tiny, tmp_path):
    changes = {**CUT, "steps": 60, "progressive_resizing": {"start": 0.5, "until": "30 steps"}}
    whole = train(tiny(**changes, out=str(tmp_path / "whole")))
    recipe, run = tmp_path / "recipe.yaml", Run(tmp_path / "killed")
    recipe.write_text(json.dumps(tiny(**changes, out=str(run.path))))
    process = start([str(recipe)])
    for step in (29, 30, 31, 45):
        wait_for_step(run, step, process)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process = start(["--resume", str(run.path)])
    assert process.wait(timeout=120) == 0
    same_bits(whole, run)


def triangle_weights(before, after):
    """The antialiased bilinear filter as a dense matrix: triangles as wide as the pixels that they replace."""
    scale = before / after
    centres = (np.arange(after)[:, None] + 0.5) * scale
    weights = np.clip(1 - np.abs(np.arange(before) + 0.5 - centres) / scale, 0, None)
    return weights / weights.sum(axis=1, keepdims=True)


def batch_of(images, patch_targets=None):
    rows = torch.arange(len(images))
    return Batch(images, rows, rows, rows, patch_targets)


def test_images_shrink_by_an_antialiased_filter_each_on_its_own():
    images = torch.rand(5, 3, 32, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    small = shrink(batch_of(images), (20, 8)).images
    rows, columns = (torch.from_numpy(triangle_weights(*axis)) for axis in ((32, 20), (24, 8)))
    torch.testing.assert_close(small, rows @ images @ columns.T, rtol=0, atol=1e-12)
    single = images.float()
    together = shrink(batch_of(single), (20, 8)).images
    assert all(torch.equal(together[i : i + 1], shrink(batch_of(single[i : i + 1]), (20, 8)).images) for i in range(5))
    assert together.min() >= 0
    assert together.max() <= 1


def test_targets_of_patches_are_means_over_the_area_that_a_smaller_patch_covers():
    """By counting: every old patch is divided so finely that both grids are made of whole parts."""
    targets = torch.rand(2, 8 * 6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    batch = batch_of(torch.rand(2, 3, 32, 24), targets)
    small = shrink(batch, (20, 16), cell=4)
    fine = targets.reshape(2, 8, 6, 3).repeat_interleave(5, 1).repeat_interleave(4, 2)
    expected = fine.reshape(2, 5, 8, 4, 6, 3).mean(dim=(2, 4)).reshape(2, 20, 3)
    torch.testing.assert_close(small.patch_targets, expected, rtol=0, atol=1e-12)


def test_patch_losses_follow_the_smaller_grid(tiny):
    seen = SizesSeen()
    data = {"source": "digits", "limit": 200, "augment": "light"}
    model = {**tiny()["model"], "depth": 2}
    recipe = tiny(data=data, model=model, treatments=["patch_diversity"], progressive_resizing=0.6, steps=4)
    run = train(recipe, callbacks=[seen])
    assert seen.train == [(4, 4)] * 3 + [(8, 8)]
    assert all(np.isfinite(row["losses"]["patch_mixing"]) for row in run.metrics if row["kind"] == "train")


def test_sizes_are_multiples_of_patches_and_cells():
    vit = create_model("vit_tiny_patch16_224", img_size=48, patch_size=4, depth=1, embed_dim=12, num_heads=1)
    assert find_multiple(vit.backbone, None) == (4, 4)
    assert find_multiple(vit.backbone, [6, 4]) == (12, 4)
    hybrid = timm.create_model("vit_tiny_r_s16_p8_224", img_size=64, depth=1)
    assert find_multiple(hybrid, None) == (32, 32)
    resnet = create_model("resnet18", channels=[4, 4, 8, 8])
    assert choose_sizes([0.5, 0.7, 0.95], resnet, ImageSpec(10, 3, (30, 42))) == [
        (16, 20),
        (20, 28),
        (28, 40),
        (30, 42),
    ]


@pytest.mark.parametrize(
    ("resizing", "sentence"),
    [
        ({"start": 0.9}, r"'progressive_resizing.start': 0.9 of 8 x 8 pixels, in multiples of 2 x 2, is full size"),
        ({"start": 0}, r"'progressive_resizing.start'"),
        ({"start": 1.5}, r"'progressive_resizing.start'"),
        ({"until": "50%"}, r"'until' has no effect without a 'start' below 1"),
        ({"stages": 2}, r"'stages' has no effect without a 'start' below 1"),
        ({"start": 0.5, "until": "soon"}, r"write a number of epochs"),
        ({"begin": 0.5}, r"Unknown key 'progressive_resizing.begin'"),
    ],
)
def test_mistakes_are_one_sentence(tiny, resizing, sentence):
    with pytest.raises(RecipeError, match=sentence):
        trainer_of(tiny(progressive_resizing=resizing))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ({"name": "mixer_s16_224", "patch_size": 2, "embed_dim": 16, "num_blocks": 1}, "Input height"),
        ({"name": "cait_xxs24_224", "patch_size": 2, "embed_dim": 16, "depth": 1, "num_heads": 2}, "Input height"),
    ],
)
def test_a_network_that_knows_one_size_is_refused_before_training(tiny, tmp_path, model, reason):
    sentence = rf"^'progressive_resizing' needs a network .* does not take 4 x 4 pixels \({reason}.*\); leave it out"
    with pytest.raises(ModelError, match=sentence) as refused:
        train(tiny(model=model, progressive_resizing=0.5))
    assert str(refused.value).count(".") == 1
    assert not (tmp_path / "run").exists()


def test_the_cost_of_a_step_is_measured_at_each_size(tiny, monkeypatch):
    seen = []
    convert = Trainer._convert

    def note(self, batch):
        converted = convert(self, batch)
        seen.append(tuple(converted.images.shape[-2:]))
        return converted

    monkeypatch.setattr(Trainer, "_convert", note)
    recipe = build_recipe(tiny(steps=None, max_time="1h", progressive_resizing={"start": 0.5, "stages": 2}))
    cost = measure_cost(recipe, open_data(recipe.data), ALONE, CPU)
    assert seen == [(4, 4), (6, 6), (8, 8)] * 7
    assert 0 < cost.smaller[0] <= cost.smaller[1] <= cost.step
