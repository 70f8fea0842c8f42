"""Lesions against plain loops over units, and the replay of a network's front against computing it anew."""

import copy
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.anatomy.networks import NETWORKS, shaken
from tests.probes.subjects import noise, subject, vit
from vitclinic._core.errors import AnatomyError
from vitclinic._core.statistics import paired_share_interval, share_interval
from vitclinic.anatomy import Anatomy
from vitclinic.anatomy.families import recognise
from vitclinic.anatomy.removal import Replay, stretches
from vitclinic.probes import Lesion, measure, parse_probes
from vitclinic.probes.features import lesion
from vitclinic.probes.output import read_output


def measured(patient, **options):
    (measurement,) = measure(patient, parse_probes([{"lesion": options}]))
    assert measurement.status == "ok", measurement.reason
    return measurement


def everything(patient):
    batches = list(patient.batches())
    return torch.cat([batch.images for batch in batches]), torch.cat([batch.targets for batch in batches])


def undecided(name):
    """A subject whose network does not answer the same for all images: the mean of its logits is zero."""
    patient = subject(name)
    images, _ = everything(patient)
    head = patient.network.backbone.head
    with torch.no_grad():
        head.bias -= patient.network.eval()(images).mean(0)
    return patient


def without_branch(network, index, kind):
    """A copy of a ViT in which the attention or the MLP of a block ends in a layer of zeros."""
    network = copy.deepcopy(network)
    block = network.backbone.blocks[index]
    layer = block.attn.proj if kind == "msa" else block.mlp.fc2
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return network


@torch.no_grad()
def test_a_vit_against_copies_with_branches_of_zeros():
    patient = undecided("vit")
    found = measured(patient)
    images, labels = everything(patient)
    network = patient.network.eval()
    whole = network(images)
    right = whole.argmax(1) == labels
    assert found.scalars["accuracy"].value == pytest.approx(right.float().mean().item())
    assert found.scalars["nll"].value == pytest.approx(F.cross_entropy(whole, labels).item(), rel=1e-5)
    rows = {row.name: row for row in found.units}
    assert list(rows) == ["position", *(f"blocks.{index}.{kind}" for index in range(3) for kind in ("msa", "mlp"))]
    drops = []
    for index in range(3):
        for kind in ("msa", "mlp"):
            logits = without_branch(network, index, kind)(images)
            still = logits.argmax(1) == labels
            row = rows[f"blocks.{index}.{kind}"]
            lost, gained = int((right & ~still).sum()), int((still & ~right).sum())
            assert row.note == "branch set to zero"
            assert row.values["accuracy"].value == pytest.approx(still.float().mean().item())
            assert (row.values["accuracy"].low, row.values["accuracy"].high) == share_interval(int(still.sum()), 22)
            drop = row.values["accuracy_drop"]
            assert drop.value == pytest.approx((lost - gained) / 22)
            assert (drop.low, drop.high) == paired_share_interval(lost, gained, 22)
            rise = F.cross_entropy(logits, labels) - F.cross_entropy(whole, labels)
            assert row.values["nll_rise"].value == pytest.approx(rise.item(), abs=1e-5)
            drops.append((kind, drop.value))
    for kind in ("msa", "mlp"):
        mean = np.mean([drop for each, drop in drops if each == kind])
        assert found.scalars[f"accuracy_drop_{kind}"].value == pytest.approx(mean)
    assert len(set(drops)) > 3


def test_removing_a_unit_that_adds_nothing_changes_nothing():
    patient = subject("vit")
    block = patient.network.backbone.blocks[1]
    for layer in (block.attn.proj, block.mlp.fc2):
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
    rows = {row.name: row.values for row in measured(patient).units}
    for name in ("blocks.1.msa", "blocks.1.mlp"):
        assert rows[name]["accuracy_drop"].value == rows[name]["nll_rise"].value == 0
        assert rows[name]["accuracy_drop"].low < 0 < rows[name]["accuracy_drop"].high
    assert all(rows[f"blocks.{index}.mlp"]["nll_rise"].value != 0 for index in (0, 2))


def test_the_3_x_3_conv_of_a_bottleneck_is_what_is_removed():
    torch.manual_seed(0)
    network = shaken(NETWORKS["vitclinic preact_resnet"]())
    patient = subject(network)
    rows = {row.name: row for row in measured(patient).units}
    assert rows["layer1.1.conv"].note == "conv replaced by the identity"
    assert rows["layer2.0.conv"].note == "conv replaced by subsampling"
    images, labels = everything(patient)
    by_hand = copy.deepcopy(network).eval()
    by_hand.layer2[0].conv2 = nn.AvgPool2d(1, stride=2)
    with torch.no_grad():
        nll = F.cross_entropy(by_hand(images), labels) - F.cross_entropy(network.eval()(images), labels)
    assert rows["layer2.0.conv"].values["nll_rise"].value == pytest.approx(nll.item(), rel=1e-4)


@pytest.fixture(params=NETWORKS, scope="module")
def network(request):
    torch.manual_seed(0)
    return shaken(NETWORKS[request.param]()).eval()


@torch.no_grad()
def test_the_replay_computes_what_the_whole_network_computes(network):
    """Of every family: bit for bit, without the blocks before the unit."""
    core, family = recognise(network)
    images = torch.randn(2, *family.input_size(core), generator=torch.Generator().manual_seed(1))
    try:
        anatomy = Anatomy.of(network)
    except AnatomyError:
        pytest.skip("no anatomy")
    forwards = [vars(module).get("forward") for module in network.modules()]
    skippable = stretches(anatomy)
    assert {stretch.last for stretch in skippable} >= {block.units[-1].depth for block in anatomy.blocks}
    with Replay(anatomy) as replay:
        with replay.record():
            read_output(network(images))
        for unit in anatomy.units:
            if unit.removal is None:
                continue
            with anatomy.remove(unit):
                plain = read_output(network(images))
                with replay.skip_before(unit.depth), running(skippable) as ran:
                    assert torch.equal(read_output(network(images)), plain), unit
            assert ran == {s.last for s in skippable if s.last >= unit.depth and list(s.module.children())}
    assert [vars(module).get("forward") for module in network.modules()] == forwards


@contextmanager
def running(skippable):
    """The depths of those of the modules in which another module runs inside the context."""
    ran = set()
    with ExitStack() as stack:
        for stretch in skippable:
            for module in list(stretch.module.modules())[1:]:
                handle = module.register_forward_pre_hook(lambda *_, last=stretch.last: ran.add(last))
                stack.callback(handle.remove)
        yield ran


def test_a_block_that_is_used_twice_is_not_skipped():
    network = vit(depth=3).eval()
    network.blocks[2] = network.blocks[0]
    anatomy = Anatomy.of(network)
    assert [stretch.module for stretch in stretches(anatomy)] == [network.patch_embed, network.blocks[1]]


@pytest.mark.parametrize("odd", ["called twice", "another type"])
def test_what_cannot_be_replayed_is_computed_anew(odd):
    network = vit(depth=3).eval()
    anatomy = Anatomy.of(network)
    images = torch.rand(2, 3, 16, 16)
    first = network.blocks[0]
    if odd == "called twice":
        network.blocks[1].register_forward_pre_hook(lambda _, args: (first(args[0]),))
    else:
        own = first.forward
        first.forward = lambda x: SimpleNamespace(value=own(x))
        network.blocks[1].register_forward_pre_hook(lambda _, args: (args[0].value,))
    with torch.no_grad(), Replay(anatomy) as replay:
        with replay.record():
            whole = network(images)
        with replay.skip_before(len(anatomy.units)), running(replay.stretches) as ran:
            assert torch.equal(network(images), whole)
    assert ran == {anatomy.unit("blocks.0.mlp").depth}


def test_writing_into_what_was_replayed_does_no_harm():
    network = vit(depth=2).eval()
    anatomy = Anatomy.of(network)
    network.blocks[1].register_forward_pre_hook(lambda _, args: (args[0].mul_(2),))
    images = torch.rand(2, 3, 16, 16)
    with torch.no_grad(), Replay(anatomy) as replay:
        whole = network(images)
        with replay.record():
            network(images)
        for _ in range(2):
            with replay.skip_before(anatomy.unit("blocks.1.msa").depth):
                assert torch.equal(network(images), whole)


@pytest.mark.parametrize("ending", [KeyboardInterrupt, RuntimeError])
def test_everything_is_restored_also_on_errors(ending):
    def progress(what, done, total):
        if done > total // 2:
            raise ending

    patient = subject("vit", progress=progress)
    if ending is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            measure(patient, [Lesion()])
    else:
        assert measure(patient, [Lesion()])[0].status == "failed"
    assert all("forward" not in vars(module) for module in patient.network.modules())
    assert not any(module._forward_hooks for module in patient.network.modules())


def test_progress_goes_up_to_the_end():
    calls = []
    measured(subject("vit", progress=lambda *call: calls.append(call)))
    done = [at for what, at, _ in calls if what == "lesion"]
    assert done == sorted(done)
    assert done[-1] == calls[-1][2] == 22 * 8


def test_a_killed_exam_goes_on_where_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(lesion, "SAVED_EVERY", 0.0)
    whole = measured(subject("vit"))

    def killed(what, done, total):
        if done > total // 2:
            raise KeyboardInterrupt

    scratch = {"lesion": tmp_path / "lesion.npz"}
    with pytest.raises(KeyboardInterrupt):
        measure(subject("vit", progress=killed, scratch=scratch), [Lesion()])
    calls = []
    again = measured(subject("vit", scratch=scratch, progress=lambda *call: calls.append(call)))
    assert (again.scalars, again.units) == (whole.scalars, whole.units)
    assert min(done for what, done, _ in calls if what == "lesion") > 8 * 8  # the first batch is not done again


@pytest.mark.parametrize("name", ["vit", "resnet", "mixer"])
def test_neither_batches_nor_memory_matter(name, monkeypatch):
    ours = measured(subject(name, batch_size=8))
    monkeypatch.setattr(lesion, "KEPT_BYTES", 1)  # one image at a time
    theirs = measured(subject(name, batch_size=5))
    np.testing.assert_array_equal(ours.arrays["correct"], theirs.arrays["correct"])
    np.testing.assert_allclose(ours.arrays["nll"], theirs.arrays["nll"], rtol=1e-4, atol=1e-5)


def test_images_and_split_are_its_own_choice():
    found = measured(subject("vit", limit=3), images=7)
    assert found.scalars["accuracy"].n == found.provenance.images == 7
    assert measured(subject("vit", count=1)).units[0].values["nll_rise"].low is None


def test_the_estimate_counts_what_runs():
    patient = subject("vit")  # three blocks: position and two units each behind 0, 1 and 2 blocks
    assert Lesion().forwards(patient) == pytest.approx(22 * (1 + 1 + 2 * (1 + 2 / 3 + 1 / 3)) + 1)


def test_answers_that_are_not_numbers_are_wrong():
    answers = lesion.LesionOutcomes(1, 2)
    batch = next(subject("vit", count=2).batches())
    answers.note(0, batch, torch.full((2, 5), torch.nan))
    assert not answers.correct.any()


def test_labels_of_other_classes_do_not_apply():
    (measurement,) = measure(subject("vit", dataset=noise(8, classes=3)), [Lesion()])
    assert measurement.status == "does_not_apply"


def test_a_network_that_answers_by_chance_has_no_lesions():
    class Forgetful(nn.Module):
        def __init__(self):
            super().__init__()
            self.vit = vit()

        def forward(self, images):
            return self.vit(F.dropout(images, 0.5, training=True))

    (measurement,) = measure(subject(Forgetful()), [Lesion()])
    assert measurement.status == "failed"
    assert "answers differently each time" in measurement.reason
