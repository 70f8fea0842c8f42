"""Small networks with a dense Hessian, and the dense Hessian itself: by another route, in float64."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, jacfwd
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.anatomy.networks import shaken
from vitclinic.data import Batch
from vitclinic.probes.curvature import clock

CLASSES, SIZE = 3, 4


class ConvNet(nn.Sequential):
    """Convolutions with BatchNorm."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 4, 3, stride=2, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 4, 2),
            nn.BatchNorm2d(4),
            nn.GELU(),
            nn.Flatten(),
            nn.Linear(4, CLASSES),
        )


def vit() -> nn.Module:
    small = {"img_size": SIZE, "patch_size": 2, "embed_dim": 4, "depth": 2, "num_heads": 2, "mlp_ratio": 2}
    return timm.models.VisionTransformer(num_classes=CLASSES, **small)


def mixer() -> nn.Module:
    return timm.models.MlpMixer(num_classes=CLASSES, img_size=SIZE, patch_size=2, embed_dim=4, num_blocks=2)


def swin() -> nn.Module:
    keywords = {"img_size": SIZE, "patch_size": 1, "window_size": 2, "embed_dim": 4, "depths": (2,), "num_heads": (2,)}
    return timm.models.SwinTransformer(num_classes=CLASSES, **keywords)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE * SIZE, 3), nn.Tanh(), nn.Linear(3, CLASSES))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "vit": vit,
    "mixer": mixer,
    "swin": swin,
    "convnet": ConvNet,
}


def network(name: str) -> nn.Module:
    torch.manual_seed(0)
    return shaken(NETWORKS[name]()).double().eval()


def batches(sizes: Sequence[int] = (5, 5, 3), soft: bool = False) -> list[Batch]:
    """Ragged batches of noise with labels, or with shares of the classes."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for size in sizes:
        images = torch.rand(size, 3, SIZE, SIZE, generator=generator, dtype=torch.float64)
        labels = torch.randint(0, CLASSES, (size,), generator=generator)
        shares = torch.rand(size, CLASSES, generator=generator, dtype=torch.float64).softmax(1)
        index = torch.arange(size)
        made.append(Batch(images, shares if soft else labels, index, index))
    return made


def _sigmoid_loss(out: Tensor, labels: Tensor) -> Tensor:
    """-log s(f) of the right class and -log(1 - s(f)) of the others, summed."""
    right = torch.arange(out.shape[1]) == labels[:, None]
    return -torch.where(right, out, -out).sigmoid().log().sum()


def dense_hessian(net: nn.Module, data: Sequence[Batch], decay: float = 0.0, sigmoid: bool = False) -> Tensor:
    """[n, n] by forward-mode derivatives of the gradient, in float64; the loss is written out here."""
    names = [name for name, _ in net.named_parameters()]
    shapes = [p.shape for p in net.parameters()]
    total = sum(len(batch) for batch in data)

    def loss(flat: Tensor) -> Tensor:
        pieces = flat.split([shape.numel() for shape in shapes])
        weights = {name: piece.view(shape) for name, piece, shape in zip(names, pieces, shapes, strict=True)}
        outputs = [functional_call(net, weights, (batch.images,)) for batch in data]
        pairs = zip(outputs, data, strict=True)
        summed = sum(
            _sigmoid_loss(out, batch.targets) if sigmoid else F.cross_entropy(out, batch.targets, reduction="sum")
            for out, batch in pairs
        )
        return summed / total + decay / 2 * flat.square().sum()

    with sdpa_kernel(SDPBackend.MATH):
        flat = torch.cat([p.detach().flatten() for p in net.parameters()])
        return jacfwd(grad(loss))(flat)


@contextmanager
def hurried(looks: int) -> Iterator[None]:
    """A clock that, once it has been looked at so often, says that an hour has passed."""
    count = 0

    def late() -> float:
        nonlocal count
        count += 1
        return time.monotonic() + 3600 * (count > looks)

    with mock.patch.object(clock, "time", mock.Mock(monotonic=late)):
        yield
