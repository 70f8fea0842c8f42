"""Streaming probes share one pass; failures stay where they are; want of memory halves the batch."""

import logging

import numpy as np
import pytest
import timm
import torch
from torch import nn

import vitclinic
from tests.probes.subjects import SIZE, noise, subject, vit
from vitclinic._core.records import Measurement, Scalar
from vitclinic.anatomy import Anatomy, out_of, record_attention
from vitclinic.probes import DoesNotApply, OwningProbe, Result, StreamingProbe, Subject, Tally, measure, parse_probes

EXACT = {"rel": 1e-12}


class Counting(nn.Module):
    """A ViT that counts its calls, and runs out of memory above `capacity` images."""

    def __init__(self, capacity=10**9):
        super().__init__()
        torch.manual_seed(0)
        self.backbone = vit()
        self.capacity = capacity
        self.batches = []

    def forward(self, x):
        self.batches.append(len(x))
        if len(x) > self.capacity:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nmore")
        return self.backbone(x)


class MeanTally(Tally):
    def __init__(self, subject, key):
        self.subject, self.key = subject, key
        self.total = self.count = self.maps = 0

    def taps(self):
        return {self.key: self.subject.anatomy.unit("blocks.1.mlp").output}

    def attention(self):
        return self.subject.anatomy.of_kind("msa")

    def update(self, key, activation):
        assert key == self.key
        self.total += activation.double().mean((1, 2)).sum().item()

    def update_attention(self, seen):
        self.maps += 1
        torch.testing.assert_close(seen.weights.sum(-1), torch.ones(seen.weights.shape[:-1]))

    def end_batch(self, batch, logits):
        assert len(logits) == len(batch)
        self.count += len(batch)

    def finish(self):
        return Result({"mean": Scalar(value=self.total / self.count, n=self.count), "maps": Scalar(value=self.maps)})


class Mean(StreamingProbe):
    name = "mean"
    needs = frozenset({"attention"})

    def begin(self, subject):
        return MeanTally(subject, "tap")


class OtherMean(Mean):
    name = "other_mean"


class Breaks(StreamingProbe):
    """Fails in its second batch."""

    name = "breaks"

    def begin(self, subject):
        tally = MeanTally(subject, "tap")
        tally.end_batch = lambda batch, logits: 1 / (len(batch) - 6) and None
        return tally


class NeverBegins(StreamingProbe):
    name = "never_begins"

    def begin(self, subject):
        raise ValueError("no beginning")


class Refuses(OwningProbe):
    name = "refuses"

    def forwards(self, subject):
        return 1

    def measure(self, subject):
        raise DoesNotApply("it is a Tuesday.")


def test_streaming_probes_share_one_forward_a_batch():
    patient = subject(Counting())
    patient.anatomy, patient.digest  # noqa: B018 (made before counting)
    patient.network.batches.clear()
    found = measure(patient, [Mean(), OtherMean(), *parse_probes(["norms"])])
    assert patient.network.batches == [8, 8, 6]
    assert [measurement.status for measurement in found] == ["ok"] * 3
    assert found[0].scalars == found[1].scalars
    assert found[0].scalars["maps"].value == 3 * 3  # layers x batches


def test_a_failing_probe_does_not_disturb_the_others():
    patient = subject(Counting())
    alone = measure(patient, [Mean()])[0]
    told = []
    found = measure(patient, [Refuses(), Breaks(), Mean(), NeverBegins()], told.append)
    refuses, breaks, mean, never = found
    assert (refuses.status, refuses.reason) == ("does_not_apply", "it is a Tuesday.")
    assert (breaks.status, breaks.reason) == ("failed", "ZeroDivisionError: division by zero")
    assert (never.status, never.reason) == ("failed", "ValueError: no beginning")
    assert mean.scalars == alone.scalars
    assert {measurement.probe for measurement in told} == {"refuses", "breaks", "mean", "never_begins"}


def test_a_tap_that_nothing_passes_is_borne_by_its_probe_alone():
    class Elsewhere(StreamingProbe):
        name = "elsewhere"

        def begin(self, subject):
            tally = MeanTally(subject, "tap")
            tally.taps = lambda: {"tap": out_of(nn.Identity())}
            return tally

    elsewhere, mean = measure(subject(Counting()), [Elsewhere(), Mean()])
    assert elsewhere.status == "failed"
    assert "were never reached" in elsewhere.reason
    assert mean.scalars == measure(subject(Counting()), [Mean()])[0].scalars


@pytest.mark.parametrize("site", [lambda head: None, lambda head: out_of(head, first="x")], ids=["none", "odd"])
def test_a_site_that_cannot_be_read_is_borne_by_its_probe_alone(site):
    class Unreadable(StreamingProbe):
        name = "unreadable"

        def begin(self, subject):
            tally = MeanTally(subject, "tap")
            tally.taps = lambda: {"tap": site(subject.network.backbone.head)}
            return tally

    unreadable, mean = measure(subject(Counting()), [Unreadable(), Mean()])
    assert unreadable.status == "failed"
    assert mean.scalars == measure(subject(Counting()), [Mean()])[0].scalars


class Broken(OwningProbe):
    """Breaks where `part` says."""

    name = "broken"
    part: str

    def forwards(self, subject):
        return 1 / (self.part != "forwards")

    def conditions(self, subject):
        return {"one": 1 / (self.part != "conditions"), "device": object() if self.part == "odd conditions" else "cpu"}

    def measure(self, subject):
        return {
            "no reason": Result(status="not_converged"),
            "no scalar": Result({"x": 1.0}),
            "no array": Result(arrays={"x": [1, 2]}),
            "objects": Result(arrays={"x": np.array([object()])}),
            "no result": None,
        }.get(self.part, Result({"x": Scalar(value=1.0)}))


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ("forwards", "ZeroDivisionError: division by zero"),
        ("conditions", "ZeroDivisionError: division by zero"),
        ("odd conditions", "'conditions.device' is of type object, which cannot be stored"),
        ("no reason", "A measurement that is not_converged needs a reason"),
        ("no scalar", "'scalars.x'"),
        ("no array", "'arrays.x'"),
        ("objects", "arrays of Python objects cannot be stored: x"),
        ("no result", "NoneType"),
    ],
)
def test_a_broken_probe_does_not_stop_an_exam(part, reason, tmp_path):
    exam = vitclinic.examine(Counting(), noise(), probes=[Broken(part=part), Mean()], out=tmp_path)
    assert exam["broken"].status == "failed"
    assert reason in exam["broken"].reason
    assert Measurement.read(exam.files["broken"]) == exam["broken"]
    assert exam["mean"].status == "ok"


def test_a_network_that_is_not_what_its_family_promises_fails():
    network = vit()
    network.blocks[1].mlp = nn.Sequential(network.blocks[1].mlp, nn.Identity())
    network.blocks[1].drop_path2 = nn.Identity()
    network.blocks[1].forward = lambda x: 2 * x
    (measurement,) = measure(subject(network), [Mean()])
    assert measurement.status == "failed"
    assert "blocks.1" in measurement.reason


def test_a_network_without_attention_does_not_apply_and_two_maps_of_a_block_are_groups_of_heads():
    (measurement,) = measure(subject("mixer"), [OtherMean()])
    assert (measurement.status, measurement.reason) == ("does_not_apply", "a timm MLP-Mixer has no attention maps.")
    parallel = vit(block_fn=timm.models.vision_transformer.ParallelThingsBlock)
    (measurement,) = measure(subject(parallel), [Mean()])
    assert measurement.status == "ok"
    maps = []
    with torch.no_grad(), record_attention(Anatomy.of(parallel).of_kind("msa"), maps.append):
        parallel(torch.rand(2, 3, SIZE, SIZE))
    heads = sum(attn.num_heads for attn in parallel.blocks[0].modules() if hasattr(attn, "num_heads"))
    assert {one.weights.shape[1] for one in maps} == {heads}


def test_attention_without_a_softmax_does_not_apply_and_attention_that_never_ran_fails():
    class Averaging(nn.Module):
        def forward(self, x, *_, **__):
            return x.mean(1, keepdim=True).expand_as(x)

    network = vit()
    network.blocks[1].attn = Averaging()
    (measurement,) = measure(subject(network), [Mean()])
    assert measurement.status == "does_not_apply"
    assert "no attention was seen in blocks.1.msa" in measurement.reason

    class Stale(Mean):
        name = "stale"

        def begin(self, subject):
            tally = MeanTally(subject, "tap")
            units = Anatomy.of(vit()).of_kind("msa")
            tally.attention = lambda: units
            return tally

    (measurement,) = measure(subject(Counting()), [Stale()])
    assert measurement.status == "failed"


def test_a_network_that_fails_fails_each_probe_with_its_reason():
    class Fragile(Counting):
        def forward(self, x):
            if len(x) == 6:
                raise RuntimeError("cannot go on")
            return super().forward(x)

    for measurement in measure(subject(Fragile()), [Mean(), OtherMean()]):
        assert (measurement.status, measurement.reason) == ("failed", "RuntimeError: cannot go on")


@pytest.mark.parametrize(("capacity", "batches"), [(4, [8, 4, 4, 4, 4, 4, 2]), (1, [8, 4, 2] + 22 * [1])])
def test_want_of_memory_halves_the_batch_and_starts_over(capacity, batches, caplog):
    expected = measure(subject(Counting()), [Mean()])[0].scalars["mean"].value
    patient = subject(Counting(capacity))
    patient.anatomy  # noqa: B018
    patient.network.batches.clear()
    with caplog.at_level(logging.WARNING):
        (measurement,) = measure(patient, [Mean()])
    assert patient.network.batches == batches
    assert measurement.scalars["mean"].value == pytest.approx(expected, rel=1e-6)
    assert measurement.scalars["mean"].n == 22
    assert measurement.provenance.batch_size == capacity
    assert patient.batch_size == 8  # the next probe may have all of it
    assert f"retrying with {capacity}" in caplog.text


def test_an_owning_probe_is_halved_too():
    (measurement,) = measure(subject(Counting(capacity=2)), parse_probes(["cost"]))
    assert measurement.status == "ok"
    assert measurement.scalars["batch"].value == measurement.provenance.batch_size == 2


def test_not_even_one_image():
    patient = subject(Counting())
    patient.anatomy  # noqa: B018
    patient.network.capacity = 0
    (measurement,) = measure(patient, [Mean()])
    assert measurement.status == "failed"
    assert measurement.reason == (
        "out of memory even with one image at a time (CUDA out of memory. Tried to allocate 20.00 MiB)."
    )


def test_the_cpu_allocator_has_words_of_its_own():
    class Huge(OwningProbe):
        name = "huge"

        def forwards(self, subject):
            return 1

        def measure(self, subject):
            if subject.batch_size > 2:
                torch.empty(2**62, dtype=torch.uint8)
            return Result({"x": Scalar(value=1.0)})

    (measurement,) = measure(subject(), [Huge()])
    assert (measurement.status, measurement.provenance.batch_size) == ("ok", 2)


@pytest.mark.parametrize("batch_size", [1, 3, 7, 22, 64])
def test_the_batch_size_changes_nothing(batch_size):
    expected = measure(subject(batch_size=22), parse_probes(["norms"]))[0]
    found = measure(subject(batch_size=batch_size), parse_probes(["norms"]))[0]
    for ours, theirs in zip(found.units, expected.units, strict=True):
        for name, scalar in ours.values.items():
            assert scalar.value == pytest.approx(theirs.values[name].value, rel=1e-5)
            assert scalar.n == theirs.values[name].n


def test_a_limit_is_stratified_and_nested():
    small, large = (subject(limit=limit) for limit in (5, 10))
    assert sorted(small.images.labels) == [0, 1, 2, 3, 4]
    assert set(small.images.rows) <= set(large.images.rows)
    assert len(subject(limit=1000)) == 22


def test_digests_tell_networks_and_data_apart():
    assert subject().digest == subject().digest
    assert subject().digest != subject("mixer").digest
    changed = subject()
    with torch.no_grad():
        next(changed.network.parameters()).view(-1)[0] += 1e-3
    assert changed.digest != subject().digest
    assert subject().data_digest == subject().data_digest
    assert subject(limit=5).data_digest != subject().data_digest
    assert subject(split="val").data_digest != subject().data_digest


class Labelled(OwningProbe):
    name = "labelled"
    needs = frozenset({"labels"})

    def forwards(self, subject):
        return 0

    def measure(self, subject):
        return Result({"classes": Scalar(value=float(np.unique(subject.images.labels).size))})


def test_labels_that_mean_something_else_do_not_apply():
    assert measure(subject(), [Labelled()])[0].status == "ok"
    (measurement,) = measure(Subject(vit(), noise(classes=3), batch_size=8), [Labelled()])
    assert measurement.status == "does_not_apply"
    assert measurement.reason.startswith("the network has 5 outputs and the data 3 classes")


@pytest.mark.parametrize(
    ("known", "reason"),
    [
        (("class 0", "class 2", "class 1", "class 3", "class 4"), "output 1 of the network is 'class 2'"),
        (("a", "b", "c", "d", "e"), "output 0 of the network is 'a' and label 0 of the data is 'class 0'"),
        (tuple(f"class {number}" for number in range(5)), None),
        (None, None),
    ],
    ids=["another order", "other names", "the same", "unknown"],
)
def test_classes_that_are_called_otherwise_do_not_apply(known, reason):
    (measurement,) = measure(Subject(vit(), noise(), batch_size=8, output_names=known), [Labelled()])
    assert measurement.status == ("does_not_apply" if reason else "ok")
    assert (reason or "") in (measurement.reason or "")
