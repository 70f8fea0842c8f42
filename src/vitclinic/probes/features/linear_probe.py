"""A linear classifier on embeddings that stay as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from vitclinic._core.records import Scalar
from vitclinic._core.registry import KeyScalars
from vitclinic.data.source import stratify
from vitclinic.probes.behaviour.intervals import share
from vitclinic.probes.features.embeddings import embed, embedding_bytes, labels_of
from vitclinic.probes.probe import OwningProbe, Result, register
from vitclinic.probes.subject import Subject

_FITTING = 12.0
"""What a fit holds in float64, relative to the embeddings in float32. Counted."""


@register
class LinearProbe(OwningProbe):
    """Accuracy of a linear classifier that is fitted to the embeddings of training images.

    Multinomial logistic regression on standardized embeddings, min_W sum_i nll_i + |W|^2 / (2 C); C is chosen on the
    val images, or on a fifth of the training images if there are none. The network needs no head.

    Example:
        >>> import timm
        >>> from vitclinic.data import open_data
        >>> model = timm.create_model("vit_tiny_patch16_224", img_size=8, patch_size=4, in_chans=1, num_classes=0)
        >>> LinearProbe(images=50)(model, open_data("digits"), limit=20, split="test").scalars["accuracy"].n
        20
    """

    name = "linear_probe"
    group = "Representation"
    rank = 320
    title = "Linear probe"
    question = "How much of the class can a linear layer read off the embedding?"
    paper = "Alain and Bengio 2016; Wang et al. 2022, Table 2"
    key_scalars: ClassVar[KeyScalars] = {"accuracy": "higher"}
    asked_for = True
    by_default: ClassVar[bool] = False

    images: Annotated[int, Field(ge=2)] = Field(10_000, description="training images, at most")
    strengths: Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=1)] = Field(
        [0.001, 0.01, 0.1, 1.0, 10.0, 100.0], description="values of C to choose among"
    )

    def check(self, subject: Subject) -> None:
        labels_of(subject)
        subject.on("train", strict=True)

    def forwards(self, subject: Subject) -> float:
        return float(len(subject) + len(subject.on("train", self.images, strict=True)))

    def peak_memory(self, subject: Subject) -> float:
        others = [subject.on("train", self.images, strict=True)]
        if len(subject.dataset.splits.get("val", ())):
            others.append(subject.on("val", strict=True))
        held = sum(embedding_bytes(each) for each in (subject, *others))
        return held + max(super().peak_memory(subject), _FITTING * held)

    def measure(self, subject: Subject) -> Result:
        train = subject.on("train", self.images, strict=True)
        x_nd, labels = embed(train).double(), labels_of(train)
        classes = len(subject.classes)
        if len(subject.dataset.splits.get("val", ())):
            val = subject.on("val", strict=True)
            fitted, chosen_on = (x_nd, labels), (embed(val).double(), labels_of(val))
        else:
            order = torch.from_numpy(stratify(labels.numpy(), subject.seed))
            held, rest = order[: len(order) // 5], order[len(order) // 5 :]
            fitted, chosen_on = (x_nd[rest], labels[rest]), (x_nd[held], labels[held])
        strength = choose_strength(fitted, chosen_on, self.strengths, classes)
        classifier = fit_linear(x_nd, labels, strength, classes)
        hits = int((classifier.predict(embed(subject).double()) == labels_of(subject)).sum())
        on_train = float((classifier.predict(x_nd) == labels).double().mean())
        return Result(
            {
                "accuracy": share(hits, len(subject)),
                "train_accuracy": Scalar(value=on_train, n=len(x_nd)),
                "strength": Scalar(value=strength),
            }
        )


class LinearClassifier(NamedTuple):
    """A linear classifier of standardized embeddings."""

    weight: Tensor
    """[K, D]"""
    bias: Tensor
    mean: Tensor
    std: Tensor

    def predict(self, x_nd: Tensor) -> Tensor:
        """Return the class of each embedding, [n]."""
        return F.linear((x_nd - self.mean) / self.std, self.weight, self.bias).argmax(1)


def fit_linear(x_nd: Tensor, labels: Tensor, strength: float, classes: int) -> LinearClassifier:
    """Fit multinomial logistic regression with an L2 penalty to standardized embeddings, by L-BFGS from zero.

    Args:
        x_nd: Embeddings [n, D], in float64.
        labels: Their classes [n].
        strength: C: the loss is sum_i nll_i + |W|^2 / (2 C); biases are not penalized.
        classes: Number of classes.

    Example:
        >>> x = torch.tensor([[-1.0], [-2.0], [1.0], [2.0]], dtype=torch.float64)
        >>> fit_linear(x, torch.tensor([0, 0, 1, 1]), 1.0, 2).predict(x)
        tensor([0, 0, 1, 1])
    """
    mean, std = x_nd.mean(0), x_nd.std(0, correction=0).clamp(min=1e-12)
    z_nd = (x_nd - mean) / std
    weight = torch.zeros(classes, z_nd.shape[1], dtype=z_nd.dtype, requires_grad=True)
    bias = torch.zeros(classes, dtype=z_nd.dtype, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weight, bias], max_iter=500, tolerance_grad=1e-7, tolerance_change=1e-12, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        penalty = weight.square().sum() / (2 * strength)
        value = (F.cross_entropy(F.linear(z_nd, weight, bias), labels, reduction="sum") + penalty) / len(z_nd)
        value.backward()  # type: ignore[no-untyped-call]
        return value

    with torch.enable_grad():
        optimizer.step(loss)  # type: ignore[no-untyped-call]
    return LinearClassifier(weight.detach(), bias.detach(), mean, std)


def choose_strength(
    fitted: tuple[Tensor, Tensor], chosen_on: tuple[Tensor, Tensor], strengths: Sequence[float], classes: int
) -> float:
    """Return the C whose classifier is right most often on other images; of several, the smallest."""
    correct = {
        strength: int((fit_linear(*fitted, strength, classes).predict(chosen_on[0]) == chosen_on[1]).sum())
        for strength in sorted(strengths)
    }
    return max(correct, key=lambda strength: correct[strength])
