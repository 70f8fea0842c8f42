"""Token labelling: the loss by hand, a teacher's labels, and what a run does with them."""

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from safetensors.numpy import save_file

from tests.rows import drop_timing
from vitclinic._core.callback import Callback
from vitclinic._core.errors import VitclinicError
from vitclinic.data import Batch, ImageSpec
from vitclinic.models import Normalized, create_model
from vitclinic.tasks import Classification
from vitclinic.tasks.token_labels import TokenLabelCriterion, find_patches
from vitclinic.training import Run, build_recipe, resume, train
from vitclinic.training.plan import plan_run
from vitclinic.training.token_label_teacher import score_positions

SPEC = ImageSpec(num_classes=5, in_chans=3, img_size=(32, 32))


def small_volo():
    """Return a VOLO of 2 x 2 tokens, whose own head scores patches."""
    wide = {"embed_dims": (24, 48, 48, 48), "num_heads": (2, 2, 2, 2), "layers": (1, 1, 1, 1)}
    return timm.models.VOLO(img_size=32, num_classes=5, stem_hidden_dim=8, mlp_ratio=2.0, **wide)


def random_batch(patches, classes=5, images=3):
    shares = torch.rand(images, patches, classes, dtype=torch.float64)
    numbers = torch.arange(images)
    pixels = torch.rand(images, 3, 32, 32, dtype=torch.float64)
    return Batch(pixels, numbers, numbers, numbers, shares / shares.sum(2, keepdim=True))


def cross_entropy(scores, shares):
    return -(shares * scores.log_softmax(-1)).sum(-1).mean()


def test_the_loss_is_that_of_the_class_token_and_the_mean_of_the_patches():
    torch.manual_seed(0)
    network = timm.models.VisionTransformer(32, 8, embed_dim=24, depth=2, num_heads=2, num_classes=5).double()
    criterion = TokenLabelCriterion(Classification(), 0.5, network, SPEC).double()
    batch = random_batch(16)
    outputs, losses = criterion(network.train(), batch)
    tokens = network.forward_features(batch.images)
    assert losses["task"].item() == pytest.approx(
        F.cross_entropy(network.head(tokens[:, 0]), batch.targets).item(), abs=1e-12
    )
    by_hand = cross_entropy(criterion.head(tokens[:, 1:]), batch.patch_targets)
    assert losses["tokens"].item() == pytest.approx(0.5 * by_hand.item(), abs=1e-12)
    assert torch.equal(outputs, network(batch.images))


def test_volo_learns_with_its_own_head_and_its_class_token_alone():
    """As its `forward_train` computes them, without mixing tokens."""
    torch.manual_seed(0)
    network = small_volo().double()
    criterion = TokenLabelCriterion(Classification(), 0.5, network, SPEC)
    assert not list(criterion.parameters())
    assert criterion.grid == (2, 2)
    batch = random_batch(4)
    _, losses = criterion(network.train(), batch)
    features = network.forward_features(batch.images)
    of_class, of_patches = network.head(features[:, 0]), network.aux_head(features[:, 1:])
    assert losses["task"].item() == pytest.approx(F.cross_entropy(of_class, batch.targets).item(), abs=1e-12)
    assert losses["tokens"].item() == pytest.approx(
        0.5 * cross_entropy(of_patches, batch.patch_targets).item(), abs=1e-12
    )


def test_networks_without_patches_are_told():
    with pytest.raises(VitclinicError, match="token_labels does not fit Sequential: it needs patches"):
        find_patches(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3072, 5)), SPEC)
    dropping = create_model("vit_tiny_fitted", img_size=32, patch_drop_rate=0.5, depth=2, embed_dim=24, num_heads=2)
    with pytest.raises(VitclinicError, match="drops patches"):
        find_patches(dropping, SPEC)


@pytest.mark.parametrize("name", ["resnet10t", "vit_tiny_patch16_224"])
def test_a_teacher_s_positions_are_scored_by_its_own_head(name):
    """The head is linear behind the pooling: the mean of the positions' scores, but for a constant, is the image's."""
    size = 64 if name.startswith("resnet") else 32
    keywords = {} if size == 64 else {"img_size": 32, "depth": 1, "class_token": False, "global_pool": "avg"}
    keywords |= {} if size == 64 else {"fc_norm": False}
    network = Normalized(timm.create_model(name, num_classes=7, **keywords), [0.5] * 3, [0.2] * 3).eval()
    images = torch.rand(2, 3, size, size)
    shares = score_positions(network, images, 7)
    assert shares.shape == (2, 2, 2, 7)
    centred = shares.log() - shares.log().mean(-1, keepdim=True)
    scores = network(images)
    assert torch.allclose(centred.mean((1, 2)), scores - scores.mean(1, keepdim=True), atol=1e-4)
    with pytest.raises(VitclinicError, match="7 classes, and the data has 5"):
        score_positions(network, images, 5)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A run on digits, to label patches by."""
    from tests.training.conftest import TINY

    return train({**TINY, "steps": 2, "out": str(tmp_path_factory.mktemp("teacher") / "run")}).path


AUGMENT = {"level": "light", "flip": False, "mixup": 0.8, "cutmix": 1.0}


def test_a_stopped_run_goes_on_to_the_same_bits(tiny, teacher, tmp_path):
    class Stop(Callback):
        def on_step(self, trainer):
            if trainer.step == 3:
                raise KeyboardInterrupt

    data = {"source": "digits", "limit": 80, "augment": AUGMENT}
    task = {"name": "classification", "token_labels": {"source": str(teacher), "class_targets": "blend"}}
    plain = tiny(task=task, data=data, steps=4, checkpoint={"every": "2 steps"}, treatments=[{"sam": {"m": 10}}])
    whole = train({**plain, "out": str(tmp_path / "whole")})
    assert {"task", "tokens"} == set(whole.metrics[0]["losses"])
    with pytest.raises(KeyboardInterrupt):
        train({**plain, "out": str(tmp_path / "cut")}, callbacks=[Stop()])
    cut = resume(tmp_path / "cut")
    assert drop_timing(cut.metrics) == drop_timing(whole.metrics)
    ours, theirs = (run.checkpoints.read_model("last") for run in (whole, cut))
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    assert len(Run(tmp_path / "cut").recipe.task.token_labels.digest) == 64


def test_labels_of_a_file_and_one_that_has_changed(tiny, tmp_path):
    file = tmp_path / "labels.safetensors"
    save_file({"shares": np.full((1797, 2, 2, 10), 0.1, np.float16)}, file)
    plain = tiny(task={"name": "classification", "token_labels": str(file)}, steps=1)
    run = train(plain)
    assert run.metrics[0]["losses"]["tokens"] == pytest.approx(0.5 * np.log(10), abs=0.1)
    task = run.recipe.task.plain()
    save_file({"shares": np.full((1797, 1, 1, 10), 0.1, np.float16)}, file)
    with pytest.raises(VitclinicError, match="it has changed"):
        train({**plain, "task": task, "out": str(tmp_path / "again")})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"task": {"name": "classification", "token_labels": "nowhere"}}, "neither a run nor a file of labels"),
        ({"progressive_resizing": 0.5}, "remove progressive_resizing"),
        ({"treatments": ["patch_diversity"]}, "both give patches their targets"),
        ({"compile": True}, "ompile is not for task.token_labels"),
    ],
)
def test_what_does_not_fit_is_one_sentence(tiny, changes, sentence):
    task = {"name": "classification", "token_labels": "labels.safetensors"}
    with pytest.raises(VitclinicError, match=sentence):
        train(tiny(**{"task": task, "steps": 1, **changes}))


def test_the_plan_of_a_run_needs_no_teacher(tiny):
    plan = plan_run(tiny(task={"name": "classification", "token_labels": "timm:dm_nfnet_f6"}))
    assert plan.objective_parameters == 33 * 10
    assert plan.memory.activations > 0


def test_the_digest_does_not_depend_on_where_the_teacher_lies(tiny):
    digests = set()
    for source in ("a", "b"):
        labels = {"source": source, "digest": "0" * 64}
        digests.add(build_recipe(tiny(task={"name": "classification", "token_labels": labels})).digest("data"))
    assert len(digests) == 1
