"""A map of the embeddings in two dimensions, with the images that lie on it.

Shapes: n images, D the width of the embedding.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from vitclinic._core.errors import MissingExtraError
from vitclinic._core.neighbours import effective_rank
from vitclinic._core.records import Scalar
from vitclinic._core.registry import KeyScalars
from vitclinic.probes.behaviour.outcomes import show_pixels
from vitclinic.probes.features.embeddings import embed_with_scores, embedding_bytes
from vitclinic.probes.probe import Cheaper, DoesNotApply, OwningProbe, Result, register
from vitclinic.probes.subject import Subject

VOTERS = 20
"""Nearest images whose vote stands for a class where the network has no class scores."""
TEMPERATURE = 0.07
"""Of that vote, as in the probe `knn`."""
_DECOMPOSED = 9
"""How many times the embeddings are held in all while they are decomposed, in float64."""


@register
class EmbeddingMap(OwningProbe):
    """Embeddings in two dimensions, by their principal components or UMAP, coloured by class and by error.

    A report shows the image under the pointer. An error is a wrong class of the network; of an encoder without class
    scores, a wrong vote of the 20 nearest other images on the map.

    Example:
        >>> import timm, torch
        >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=2)
        >>> loader = [(torch.rand(8, 3, 32, 32), torch.arange(8) % 2)]
        >>> EmbeddingMap()(model, loader).arrays["points"].shape
        (8, 2)
    """

    name = "embedding_map"
    group = "Representation"
    rank = 65
    title = "Map of the embeddings"
    question = "Which images look similar to the network, and where do the errors lie?"
    paper = "Pearson 1901 (PCA); McInnes et al. 2018 (UMAP); Roy and Vetterli 2007 (effective rank)"
    key_scalars: ClassVar[KeyScalars] = {"effective_rank": None, "variance_shown": None}
    by_default: ClassVar[bool] = False
    cheaper: ClassVar[Cheaper] = ({"images": 200},)

    method: Literal["pca", "umap"] = Field("pca", description="principal components, or UMAP (an extra)")
    images: Annotated[int, Field(ge=3, le=5000)] = Field(500, description="images on the map, at most")
    neighbours: Annotated[int, Field(ge=2)] = Field(15, description="neighbours that stay together (umap only)")

    def view(self, subject: Subject) -> Subject:
        return subject.on(subject.split, min(self.images, len(subject)))

    def check(self, subject: Subject) -> None:
        if len(subject) < 3:
            raise DoesNotApply("a map needs three images.")

    def forwards(self, subject: Subject) -> float:
        return float(len(subject))

    def peak_memory(self, subject: Subject) -> float:
        held = embedding_bytes(subject)
        return max(2 * held + super().peak_memory(subject), _DECOMPOSED * held)

    def measure(self, subject: Subject) -> Result:
        x_nd, scores = embed_with_scores(subject)
        scalars = {"effective_rank": Scalar(value=effective_rank(x_nd), n=len(x_nd))}
        if self.method == "pca":
            points, shown = principal_components(x_nd)
            scalars["variance_shown"] = Scalar(value=float(shown.sum()), n=len(x_nd))
        else:
            points = torch.from_numpy(map_by_umap(x_nd.numpy(), self.neighbours, subject.seed))
        arrays = {"points": points.float().numpy(), **show_pixels(subject, np.arange(len(subject)))}
        if subject.classes:
            labels = torch.from_numpy(subject.images.labels.copy())
            comparable = scores is not None and not subject.drawn and scores.shape[1] == len(subject.classes)
            said = scores.argmax(1) if scores is not None and comparable else vote_of_others(x_nd, labels)
            arrays |= {"labels": labels.numpy(), "predicted": said.numpy(), "by_scores": np.array(comparable)}
            arrays["classes"] = np.array(subject.classes, dtype=np.str_)
        return Result(scalars, arrays=arrays)


class Components(NamedTuple):
    """Principal components of some points."""

    points_nk: Tensor
    """Coordinates along the components."""
    shares_k: Tensor
    """Share of the whole variance along each."""


def principal_components(x_nd: Tensor, count: int = 2) -> Components:
    """Return the coordinates of points along the directions in which they vary most, in float64 [Pearson 1901].

    Signs are such that the largest entry of a direction is positive. Directions without variance have coordinates 0.

    Example:
        >>> points, shares = principal_components(torch.tensor([[3.0, 0.0], [0.0, 0.0], [-3.0, 0.0]]))
        >>> points[:, 0].tolist(), round(float(shares[0]), 6)
        ([3.0, 0.0, -3.0], 1.0)
    """
    centred = x_nd.double() - x_nd.double().mean(0)
    _, lengths, directions = torch.linalg.svd(centred, full_matrices=False)
    largest = directions.gather(1, directions.abs().argmax(1, keepdim=True))
    points = (centred @ (directions * largest.sign()).T)[:, :count]
    total = lengths.square().sum().clamp(min=torch.finfo(torch.float64).tiny)
    shares = (lengths.square() / total)[:count]
    missing = count - points.shape[1]  # of embeddings with a single number
    return Components(F.pad(points, (0, missing)), F.pad(shares, (0, missing)))


def map_by_umap(x_nd: NDArray[np.float32], neighbours: int, seed: int) -> NDArray[np.float32]:
    """Return a map by UMAP [McInnes et al. 2018], by cosine similarity.

    Raises:
        MissingExtraError: umap-learn is not installed.
    """
    try:
        from umap import UMAP
    except ImportError:
        raise MissingExtraError("a map by UMAP", "umap") from None
    known = min(neighbours, len(x_nd) - 1)
    found = UMAP(n_neighbors=known, metric="cosine", random_state=seed, n_jobs=1).fit_transform(x_nd)
    return np.asarray(found, dtype=np.float32)


def vote_of_others(x_nd: Tensor, labels_n: Tensor, k: int = VOTERS) -> Tensor:
    """Return the class that the k nearest other images vote for, by cosine similarity, [n].

    Example:
        >>> x = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 1.0]])
        >>> vote_of_others(x, torch.tensor([0, 1, 1, 1]), k=1)
        tensor([1, 0, 1, 1])
    """
    unit = F.normalize(x_nd, dim=1)
    similarity = (unit @ unit.T).fill_diagonal_(-torch.inf)
    nearest, index = similarity.topk(min(k, len(unit) - 1), dim=1)
    weights = ((nearest - nearest[:, :1]) / TEMPERATURE).exp()
    votes = torch.zeros(len(unit), int(labels_n.max()) + 1, dtype=weights.dtype)
    return votes.scatter_add_(1, labels_n[index], weights).argmax(1)
