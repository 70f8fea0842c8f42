"""Probes outside of `examine`: called on (model, loader), and watching a loop of one's own."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import vitclinic
from vitclinic._core.errors import DataError, ModelError, RecipeError
from vitclinic.models import Normalized
from vitclinic.probes import (
    CKA,
    DoesNotApply,
    Fourier,
    Norms,
    ProbeCollection,
    Sharpness,
    Subject,
    TrainNLL,
    load_subject,
    measure,
    parse_probes,
)
from vitclinic.probes.probe import StreamingProbe
from vitclinic.probes.selection import known_probes

STREAMING = [name for name, probe in known_probes().items() if issubclass(probe, StreamingProbe)]
MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)


def build(**keywords) -> nn.Module:
    torch.manual_seed(0)
    small = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 2, "num_classes": 5}
    return timm.models.VisionTransformer(**(small | keywords)).eval()


@pytest.fixture
def images() -> torch.Tensor:
    return torch.rand(20, 3, 16, 16, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def labels() -> torch.Tensor:
    return torch.arange(20) % 5


@pytest.fixture
def loader(images, labels) -> DataLoader:
    return DataLoader(TensorDataset(images, labels), batch_size=8)


def numbers(measurement):
    rows = [(row.name, {key: value.value for key, value in row.values.items()}) for row in measurement.units]
    return {name: scalar.value for name, scalar in measurement.scalars.items()}, rows


def test_a_probe_called_on_a_loader_equals_the_exam_of_the_same_images(loader):
    subject = load_subject(build(), loader, batch_size=8)
    for probe in (Fourier(), Norms(), CKA(batch=8)):
        (expected,) = measure(subject, [probe])
        assert numbers(probe(build(), loader, batch_size=8)) == numbers(expected)


def test_a_collection_in_ones_own_loop_equals_the_shared_pass(loader):
    probes = [{"cka": {"batch": 8}} if name == "cka" else name for name in STREAMING]
    model = build()
    subject = load_subject(model, loader, batch_size=8)
    expected = {found.probe: found for found in measure(subject, parse_probes(probes))}
    with torch.no_grad(), ProbeCollection(model, probes) as collection:
        for batch, targets in loader:
            model(batch)
            collection.update(targets)
    results = collection.compute()
    assert results.keys() == expected.keys()
    for name, found in results.items():
        assert (found.status, found.reason) == (expected[name].status, expected[name].reason), name
        assert numbers(found) == numbers(expected[name]), name
        assert found.provenance.images == 20
    assert sum(found.status == "ok" for found in results.values()) >= 7


def test_a_collection_also_watches_a_loop_with_gradients_and_leaves_the_model_alone(loader):
    model = build()
    hooks = [len(part._forward_hooks) for part in model.modules()]
    with ProbeCollection(model, ["fourier", "attention_entropy", "accuracy"]) as collection:
        for batch, targets in loader:
            nn.functional.cross_entropy(model(batch), targets).backward()
            collection.update(targets)
    assert all(found.status == "ok" for found in collection.compute().values())
    assert [len(part._forward_hooks) for part in model.modules()] == hooks
    assert collection.compute()["fourier"].provenance.mode == "eval"


def test_a_collection_says_in_which_mode_the_network_was(loader):
    model = build(proj_drop_rate=0.5).train()
    with ProbeCollection(model, "norms") as collection:
        for batch, targets in loader:
            model(batch)
            collection.update(targets)
    assert collection.compute()["norms"].provenance.mode == "train"
    assert model.training


BATCH = torch.rand(4, 3, 16, 16)
ONE_HOT = torch.eye(4, dtype=torch.long)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ([(BATCH, ["cat"] * 4)], r"Labels must be class indices .*, as numbers \(got \['cat'"),
        ([(BATCH, ONE_HOT)], r"of one-hot or soft labels, pass labels.argmax\(1\)"),
        ([(BATCH[0], ONE_HOT[0])], "of one-hot or soft labels"),
        ([(BATCH.numpy(), ONE_HOT)], "ndarray instead of images .B, C, h, w. as a tensor"),
        ({"training": [BATCH], "test": [BATCH]}, "has the splits train, val, test as keys .got training, test"),
        ({"images": BATCH}, r"put a single batch into a list, as in data=\[batch\]"),
    ],
)
def test_wrong_batches_are_sentences(data, sentence):
    with pytest.raises(DataError, match=sentence):
        Norms()(build(), data)


def test_mean_and_std_of_another_number_of_channels_are_a_sentence():
    with pytest.raises(DataError, match="mean and std have 2 values and the images 3 channels"):
        Norms()(build(), [BATCH], mean=[0.5, 0.5], std=[0.5, 0.5])


def test_images_with_channels_last_are_told_what_to_do():
    with pytest.raises(ModelError, match=r"If their channels come last, use images.permute\(0, 3, 1, 2\)"):
        Norms()(build(), [BATCH.permute(0, 2, 3, 1)])


@pytest.mark.parametrize("model", ["timm:resnet18", torch.relu])
def test_a_collection_takes_modules_only(model):
    with pytest.raises(RecipeError, match=r"ProbeCollection takes a torch.nn.Module \(got "):
        ProbeCollection(model, ["fourier"])


def test_labels_that_are_no_class_indices_are_a_sentence(loader):
    model, (batch, _) = build(), next(iter(loader))
    with ProbeCollection(model, ["accuracy"]) as collection:
        model(batch)
        with pytest.raises(RecipeError, match=r"expects class indices, \[8\], as numbers \(got \['cat'"):
            collection.update(["cat"] * 8)
        with pytest.raises(RecipeError, match=r"of one-hot or soft labels, pass labels.argmax\(1\)"):
            collection.update(torch.eye(8))


def test_a_call_of_forward_is_told_from_one_of_the_network(loader):
    model, (batch, targets) = build(), next(iter(loader))
    with ProbeCollection(model, ["accuracy"]) as collection:
        model.forward(batch)
        with pytest.raises(RecipeError, match=r"as in model\(images\)"):
            collection.update(targets)


def test_a_forgotten_update_labels_or_call_is_a_sentence(loader):
    model, (batch, targets) = build(), next(iter(loader))
    with ProbeCollection(model, ["accuracy"]) as collection:
        with pytest.raises(RecipeError, match="Call the network"):
            collection.update(targets)
        with pytest.raises(RecipeError, match="nothing to compute"):
            collection.compute()
        model(batch)
        with pytest.raises(RecipeError, match="accuracy needs labels"):
            collection.update()
        with pytest.raises(RecipeError, match="expects one label per image"):
            collection.update(targets[:3])
        with pytest.raises(RecipeError, match=r"Call update\(\) after each forward pass"):
            model(batch)
        collection.update(targets)
        assert collection.compute()["accuracy"].scalars["accuracy"].n == 8
        collection.reset()
        model(batch)
        collection.update(targets)
        assert collection.compute()["accuracy"].scalars["accuracy"].n == 8


def test_a_failing_forward_pass_does_not_confuse_a_collection(loader):
    model, (batch, targets) = build(), next(iter(loader))
    with ProbeCollection(model, ["norms"]) as collection:
        model(batch)
        collection.update(targets)
        with pytest.raises(AssertionError):
            model(batch[..., :8])
        model(batch)
        collection.update(targets)
    assert collection.compute()["norms"].provenance.images == 16


def test_probes_with_passes_of_their_own_cannot_watch_a_loop():
    with pytest.raises(RecipeError, match="sharpness makes its own passes"):
        ProbeCollection(build(), ["sharpness"])


def test_a_loader_that_normalizes_is_handled_when_told(images, labels):
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    outside = DataLoader(TensorDataset((images - mean) / std, labels), batch_size=8)
    inside = DataLoader(TensorDataset(images, labels), batch_size=8)
    expected = numbers(Norms()(Normalized(build(), MEAN, STD), inside))
    for given, normalized in ((outside, None), (outside, True), (inside, None), (inside, False)):
        found = numbers(Norms()(build(), given, mean=MEAN, std=STD, normalized=normalized))
        assert found[0] == pytest.approx(expected[0], rel=1e-5)


def test_the_networks_own_preprocessing_is_used_when_told(images, labels):
    model = build()
    model.pretrained_cfg = {"mean": MEAN, "std": STD}
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    outside = DataLoader(TensorDataset((images - mean) / std, labels), batch_size=8)
    found = numbers(Norms()(model, outside, normalized=True))
    assert found[0] == pytest.approx(numbers(Norms()(build(), outside, mean=MEAN, std=STD))[0], rel=1e-6)
    with pytest.raises(RecipeError, match="does not state its normalization"):
        Norms()(nn.Sequential(build()), outside, normalized=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x * 4 - 2, "pixels range from -2 to 2; expected .0, 1."),
        (lambda x: (x * 255).byte(), "divide them by 255"),
        (lambda x: x / 255, "divided by 255 twice"),
        (lambda x: x.index_fill(0, torch.tensor([3]), torch.nan), "not finite"),
        (lambda x: x[:, 0], "instead of images .B, C, h, w."),
    ],
)
def test_a_wrong_range_is_told(images, labels, change, message):
    with pytest.raises(DataError, match=message):
        Norms()(build(), [(change(images), labels)] if change(images).ndim == 4 else [change(images)[0]])


def test_images_may_be_dark_if_told(images, labels):
    assert Norms()(build(), [(images / 255, labels)], normalized=False).status == "ok"
    assert Norms()(build(), [(images * 0, labels)]).status == "ok"


def test_a_wrong_mean_is_told(images, labels):
    with pytest.raises(DataError, match="After undoing mean and std"):
        Norms()(build(), [(images * 10 - 5, labels)], mean=MEAN, std=STD)


def test_batches_may_be_mappings_single_samples_or_have_no_labels(images, labels):
    expected = numbers(Norms()(build(), [(images, labels)]))
    assert numbers(Norms()(build(), [{"pixel_values": images, "labels": labels}])) == expected
    assert numbers(Norms()(build(), TensorDataset(images, labels))) == expected
    assert numbers(Norms()(build(), [images])) == expected
    with pytest.raises(DoesNotApply, match="the data has no labels"):
        Sharpness()(build(), [images])


def test_a_loader_without_all_classes_still_means_the_networks_outputs(images):
    subject = load_subject(build(), [(images, torch.zeros(20, dtype=torch.long))])
    assert len(subject.classes) == 5


def test_named_classes_are_kept(images, labels):
    data = TensorDataset(images, labels)
    data.classes = ["ant", "bee", "cat", "dog", "eel"]
    assert load_subject(build(), DataLoader(data, batch_size=4)).classes == tuple(data.classes)


def test_what_is_about_training_images_asks_for_them(loader):
    subject = load_subject(build(), loader)
    (found,) = measure(subject, [TrainNLL()])
    assert (found.status, found.reason) == (
        "does_not_apply",
        "it is measured on train images, and the data has none.",
    )
    (found,) = measure(load_subject(build(), {"train": loader, "test": loader}), [TrainNLL()])
    assert found.status == "ok"
    assert TrainNLL()(build(), loader).scalars["nll"].value == found.scalars["nll"].value


def test_a_limit_reads_no_more_of_an_endless_loader(images, labels):
    def endless():
        while True:
            yield images, labels

    subject: Subject = load_subject(build(), endless(), limit=30)
    assert len(subject) == 30


def test_examine_takes_a_loader_normalized_as_the_network_wants_it(images, labels, tmp_path):
    model = build()
    model.pretrained_cfg = {"mean": MEAN, "std": STD}
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    outside = [((images - mean) / std, labels)]
    options = {"probes": ["norms", "accuracy"], "out": tmp_path}
    with pytest.raises(DataError, match="normalized=True"):
        vitclinic.examine(model, data=outside, **options)
    told = vitclinic.examine(model, data=outside, normalized=True, **options)
    given = vitclinic.examine(model, data=outside, mean=MEAN, std=STD, **options)
    assert numbers(told["norms"]) == numbers(given["norms"])
    assert told["accuracy"].provenance.images == 20


class Named(nn.Module):
    """A network that returns its output under a name, beside another tensor."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self.inner, self.key = build(), key

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"features": x.mean((2, 3)), self.key: self.inner(x)}


def test_an_output_may_be_a_mapping_with_logits_and_a_refusal_leaves_the_network_as_it_was(loader):
    batch, targets = next(iter(loader))
    good, bad = Named("logits"), Named("scores").train()
    with torch.no_grad(), ProbeCollection(good.eval(), ["accuracy"]) as collection:
        good(batch)
        collection.update(targets)
    assert collection.compute()["accuracy"].status == "ok"
    with (
        ProbeCollection(bad, ["accuracy"]),
        pytest.raises(ModelError, match=r"2 tensors .*none of them called 'logits'\. Pass output="),
    ):
        bad(batch)
    assert all(part.training for part in bad.modules())


def test_labels_in_a_loop_are_class_indices_of_the_network(loader):
    model, (batch, targets) = build(), next(iter(loader))
    with ProbeCollection(model, ["accuracy"]) as collection:
        model(batch)
        with pytest.raises(RecipeError, match="nothing to compute yet"):
            collection.compute()
        with pytest.raises(RecipeError, match="expects class indices"):
            collection.update(torch.rand(8))
        with pytest.raises(RecipeError, match="labels range from 5 to 9, and the network has 5 outputs"):
            collection.update(targets + 5)


def test_a_collection_knows_the_network_by_the_digest_that_a_probe_gives(loader):
    model = build()
    with ProbeCollection(model, ["norms"]) as collection:
        for batch, targets in loader:
            model(batch)
            collection.update(targets)
        inside = collection.compute()["norms"].subject
    assert inside == collection.compute()["norms"].subject == Norms()(model, loader).subject


def test_half_precision_is_watched(loader):
    model, (batch, targets) = build().bfloat16(), next(iter(loader))
    with torch.no_grad(), ProbeCollection(model, ["norms"]) as collection:
        model(batch.bfloat16())
        collection.update(targets)
    assert collection.compute()["norms"].status == "ok"


def test_the_precision_of_an_autocast_is_recorded(loader):
    model, (batch, targets) = build(), next(iter(loader))
    found = {}
    for enabled in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled), ProbeCollection(model, ["norms"]) as collection:
            model(batch)
            collection.update(targets)
        found[enabled] = collection.compute()["norms"]
    assert found[True].conditions == {"autocast": "bfloat16"}
    assert found[False].conditions == {}
    assert found[True].terms != found[False].terms
    assert numbers(found[True]) != numbers(found[False])


def test_the_precision_of_a_loop_does_not_change_on_the_way(loader):
    model, (batch, targets) = build(), next(iter(loader))
    with ProbeCollection(model, ["norms"]) as collection:
        model(batch)
        collection.update(targets)
        with torch.autocast("cpu"), pytest.raises(RecipeError, match="off for earlier batches and is bfloat16 now"):
            model(batch)


def test_an_autocast_around_a_probe_changes_no_number(loader):
    model = build()
    with torch.autocast("cpu"):
        inside = Norms()(model, loader)
    assert numbers(inside) == numbers(Norms()(model, loader))


def test_a_training_network_is_told_of(loader, caplog):
    model, (batch, targets) = build().train(), next(iter(loader))
    with ProbeCollection(model, ["norms"]) as collection:
        for _ in range(2):
            model(batch)
            collection.update(targets)
    assert caplog.text.count("training mode") == 1


def test_a_probe_is_called_on_a_network(loader):
    with pytest.raises(RecipeError, match=r"with a torch\.nn\.Module"):
        Norms()("resnet18", loader)
    with pytest.raises(RecipeError, match="one number per channel"):
        Norms()(build(), loader, mean=0.5, std=0.5)
