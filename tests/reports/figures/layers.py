"""What real probes find of tiny networks, for the figures of representation and attention."""

from functools import cache

import timm
import torch

import vitclinic.reports.figures  # noqa: F401 (those who draw)
from tests.probes.subjects import CLASSES, SIZE, subject
from vitclinic._core.records import Measurement
from vitclinic.probes import measure, parse_probes
from vitclinic.reports.figure import ExamView
from vitclinic.treatments import treat

PROBES = (
    "fourier",
    "variance",
    "cka",
    "lesion",
    "token_similarity",
    "token_norms",
    "sparsity",
    "attention_entropy",
    "softmax_jacobian",
    "attention_distance",
    "attention_maps",
    "cb_scale",
)


def _broadcasting():
    small = {"img_size": SIZE, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 2, "num_classes": CLASSES}
    return treat(timm.models.VisionTransformer(**small), {"context_broadcasting": {"scaled": True}})


@cache
def measurements(network: str = "vit") -> dict[str, Measurement]:
    """By probe: of "vit" (depth 3), "resnet" (four stages), "mixer", or "broadcasting" (a ViT of depth 2 with CB_S)."""
    patient = subject(_made_wild(_broadcasting()) if network == "broadcasting" else network, count=12)
    return {found.probe: found for found in measure(patient, parse_probes(list(PROBES)))}


def _made_wild(network):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return network


def exams(*networks: str, names: tuple[str, ...] = ()) -> list[ExamView]:
    """Networks side by side, under the names given, else under their own."""
    return [ExamView(name, measurements(one)) for name, one in zip(names or networks, networks, strict=True)]


def changed(probe: str, network: str = "vit", **changes) -> list[ExamView]:
    """The network with another measurement of the probe."""
    return [ExamView(network, {probe: measurements(network)[probe].model_copy(update=changes)})]
