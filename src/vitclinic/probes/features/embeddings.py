"""Embeddings: one vector for each image, and what distances between them say.

The embedding of an image is what the classifier reads, or what an encoder without one returns. Features with positions
are averaged over them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitclinic._core.errors import ModelError
from vitclinic._core.neighbours import knn_votes
from vitclinic.anatomy.wrappers import unwrap
from vitclinic.models.filling import find_classifier
from vitclinic.probes.guards import preserve_state
from vitclinic.probes.output import read_output
from vitclinic.probes.probe import DoesNotApply
from vitclinic.probes.subject import Subject

_KNOWN: WeakKeyDictionary[Subject, Tensor] = WeakKeyDictionary()
"""Embeddings that were computed: probes that look at the same images share one pass."""


def embed(subject: Subject) -> Tensor:
    """Return the embeddings of a subject's images, [n, D] in float32 on the CPU.

    The network must be in eval mode. A second call for the same subject returns the same tensor.

    Raises:
        ModelError: Some are not finite.
    """
    if subject not in _KNOWN:
        _KNOWN[subject] = _join([x for x, _ in _walk(subject)])
    return _KNOWN[subject]


def embed_with_scores(subject: Subject) -> tuple[Tensor, Tensor | None]:
    """Return the embeddings of a subject's images and their class scores [n, K], None of an encoder without these.

    Raises:
        ModelError: Some embeddings are not finite.
    """
    seen = list(_walk(subject))
    x_nd = _KNOWN[subject] = _join([x for x, _ in seen])
    return x_nd, None if subject.features is not None else torch.cat([scores for _, scores in seen])


def _walk(subject: Subject) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield embeddings and outputs of all images, batch by batch, in float32 on the CPU."""
    with torch.no_grad(), _watch_classifier(subject) as read:
        for batch in subject.batches():
            output = subject.logits(batch.images)
            yield read(output).float().cpu(), output.float().cpu()


def _join(parts: list[Tensor]) -> Tensor:
    x_nd = torch.cat(parts)
    if not x_nd.isfinite().all():
        raise ModelError("the embedding is not finite (NaN or infinity) for some image.")
    return x_nd


def embedding_bytes(subject: Subject) -> int:
    """Return the bytes of the embeddings of a subject's images."""
    with preserve_state(subject.network, subject.seed), torch.no_grad(), _watch_classifier(subject) as read:
        return int(read(subject.logits(subject.example)).float().nbytes) * len(subject)


def labels_of(subject: Subject) -> Tensor:
    """Return the labels of a subject's images, [n].

    Raises:
        DoesNotApply: The data has no labels.
    """
    if not subject.classes:
        raise DoesNotApply("the data has no labels.")
    return torch.from_numpy(subject.images.labels.copy())


@contextmanager
def _watch_classifier(subject: Subject) -> Iterator[Any]:
    """Yield a function from the network's output for a batch to its embeddings."""
    seen: list[tuple[Tensor, Any]] = []
    classifier = None if subject.features is not None else _find_layer(subject.network)
    if classifier is None:
        yield lambda output: output
        return

    def read(output: Tensor) -> Tensor:
        """Return what the classifier read, if its output is the network's; else the output."""
        inputs, returned = seen[-1] if seen else (output, output)
        seen.clear()
        same = isinstance(returned, Tensor) and returned.numel() == output.numel()
        return read_output(inputs) if same and torch.equal(returned.reshape(output.shape), output) else output

    def note(_: nn.Module, inputs: tuple[Any, ...], returned: Any) -> None:
        if inputs and isinstance(inputs[0], Tensor):
            seen.append((inputs[0].detach(), returned))

    handle = classifier.register_forward_hook(note)
    try:
        yield read
    finally:
        handle.remove()


def _find_layer(network: nn.Module) -> nn.Module | None:
    """Return the layer that computes the class scores."""
    core, _ = unwrap(network)
    modules = dict(core.named_modules())
    return next((modules[name[:-1]] for name in find_classifier(core) if name[:-1] in modules), None)


def knn_predict(
    train: Tensor, labels: Tensor, queries: Tensor, k: int = 20, temperature: float | None = None
) -> Tensor:
    """Return the class of each query by a vote of its k nearest training embeddings, in cosine similarity, [m].

    A neighbour's vote weighs exp(similarity / temperature) [Wu et al. 2018, Caron et al. 2021], or 1 without a
    temperature. Among classes with the same votes, the first is taken.

    Example:
        >>> train = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]])
        >>> knn_predict(train, torch.tensor([1, 1, 0]), torch.tensor([[0.8, 0.2]]), k=1)
        tensor([1])
    """
    return knn_votes(train, labels, queries, int(labels.max()) + 1, k, temperature).argmax(1)


def matching_curve(first_rank: Tensor, ranks: int) -> Tensor:
    """Return the cumulative matching characteristic: the share of queries with a hit within 1, 2, ... `ranks`, [ranks].

    Example:
        >>> matching_curve(torch.tensor([1, 3, 2, 1]), 3)
        tensor([0.5000, 0.7500, 1.0000])
    """
    return (first_rank[:, None] <= torch.arange(1, ranks + 1)).float().mean(0)


def alignment(x_nd: Tensor, labels: Tensor, alpha: float = 2.0) -> float:
    """Return the mean of |x - y|^alpha over pairs of images of one class, for unit vectors [Wang and Isola 2020].

    NaN without such a pair.

    Example:
        >>> alignment(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([3, 3]))
        2.0
    """
    x_nd = F.normalize(x_nd.double(), dim=1)
    total, pairs = 0.0, 0
    for label in sorted(set(labels.tolist())):
        squared = _squared_distances(x_nd[labels == label])
        total += float(squared.pow(alpha / 2).sum())
        pairs += len(squared)
    return total / pairs if pairs else math.nan


def uniformity(x_nd: Tensor, t: float = 2.0) -> float:
    """Return log mean exp(-t |x - y|^2) over all pairs of images, for unit vectors [Wang and Isola 2020].

    0 if all are the same; the lower, the more evenly they are spread over the sphere.

    Example:
        >>> uniformity(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
        -8.0
    """
    squared = _squared_distances(F.normalize(x_nd.double(), dim=1))
    return float(torch.logsumexp(-t * squared, 0) - math.log(len(squared)))


def _squared_distances(x_nd: Tensor) -> Tensor:
    """Return the squared distances of all pairs, each once, of unit vectors."""
    rows, columns = torch.triu_indices(len(x_nd), len(x_nd), 1)
    gram = x_nd @ x_nd.T
    return (2 - 2 * gram[rows, columns]).clamp(min=0)
