"""Variance of feature maps over positions [park2022 Fig. 9, D.1]."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from vitclinic._core.registry import FigureSpec, KeyScalars
from vitclinic.probes.features.changes import ChangesTally
from vitclinic.probes.probe import Need, StreamingProbe, Tally, register
from vitclinic.probes.subject import Subject


@register
class Variance(StreamingProbe):
    """Variance of the state after each unit over positions, and its change across units [park2022 Fig. 9].

    1/C sum_c 1/(N - 1) sum_p (x_cp - mean_p x_cp)^2 over the N positions of the C feature maps of an image, averaged
    over images.

    Example:
        >>> import timm, torch
        >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=10)
        >>> loader = [(torch.rand(8, 3, 32, 32), torch.arange(8))]
        >>> Variance()(model, loader).scalars["variance_last"].value > 0
        True
    """

    name = "variance"
    group = "Representation"
    rank = 50
    title = "Variance by depth"
    question = "Which layers average feature maps, and which spread them?"
    paper = "Park and Kim 2022, Fig. 9, D.1 (P7)"
    key_scalars: ClassVar[KeyScalars] = {
        "variance_last": None,
        "variance_change_msa": None,
        "variance_change_mlp": None,
        "variance_change_conv": None,
    }
    figures = (
        FigureSpec(
            name="variance-depth",
            kind="states",
            values={"variance": "variance"},
            table=["change"],
            title="Variance of feature maps by depth",
            reading="Each point is how much the feature maps after a unit vary over their positions; the shade between"
            " two points is the unit that leads from one to the other, and dotted lines part stages. Park and Kim"
            " found that MSAs lower it, as averaging does, and that MLPs and convs raise it; it has the scale of the"
            " features, so compare within a network.",
        ),
    )
    needs: ClassVar[frozenset[Need]] = frozenset({"anatomy"})

    def begin(self, subject: Subject) -> Tally:
        return _Tally(subject.anatomy)


class _Tally(ChangesTally):
    number = "variance"

    def numbers(self, maps: Tensor) -> Tensor:
        return spatial_variance(maps)[:, None]


def spatial_variance(maps: Tensor) -> Tensor:
    """Return the variance over positions of feature maps [B, C, H, W], averaged over channels, [B].

    The denominator is the number of positions minus one, as in torch.var and the paper's notebook.

    Example:
        >>> import torch
        >>> checkerboard = torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
        >>> spatial_variance(checkerboard.expand(1, 3, 2, 2))  # 4 / 3
        tensor([1.3333])
    """
    x_bcn = maps.flatten(2)
    # Two passes avoid cancellation; torch.var over strided positions takes ten times as long.
    centred = x_bcn - x_bcn.mean(2, keepdim=True)
    return centred.square_().sum(2).mean(1) / (x_bcn.shape[2] - 1)
