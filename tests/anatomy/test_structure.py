"""Recognising networks: wrappers, registered families, errors, and surgery by blocks."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from tests.anatomy.networks import NETWORKS, Normalized, cut, shaken, tiny_vit
from vitclinic._core import registry as plugins
from vitclinic._core.errors import AnatomyError
from vitclinic.anatomy import Anatomy, Family, out_of, register_family, taps
from vitclinic.anatomy.families import family as registry
from vitclinic.anatomy.families import recognise
from vitclinic.anatomy.families import timm_transformers as swin

DOCS = Path(__file__).parents[2] / "docs" / "anatomy.md"


@pytest.fixture(autouse=True)
def _families_as_they_were() -> Iterator[None]:
    before = list(registry._families)
    yield
    registry._families[:] = before


class ConvBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x)


class MyNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 4, stride=4)
        self.blocks = nn.Sequential(ConvBlock(), ConvBlock())
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


MyNet.__module__, MyNet.__qualname__ = "mypackage.nets", "MyNet"


def documented_family() -> Family:
    """The family that docs/anatomy.md registers."""
    code = next(code for code in re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.S) if "FAMILY =" in code)
    assert len([line for line in code.splitlines() if line.strip()]) <= 14
    namespace: dict[str, Any] = {}
    exec(code, namespace)  # noqa: S102
    return namespace["FAMILY"]


def test_the_documented_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    first, second, recipe = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.S)[:3]
    namespace: dict[str, Any] = {}
    exec(first, namespace)  # noqa: S102
    assert capsys.readouterr().out in DOCS.read_text()  # the table that the page shows
    exec(second, namespace)  # noqa: S102
    assert namespace["features"].shape == (2, 192, 14, 14)
    assert "blocks.1.msa torch.Size([2, 3, 197, 197])" in capsys.readouterr().out
    exec(recipe, namespace)  # noqa: S102
    assert namespace["tokens"].shape == (2, 192, 14, 14)
    assert torch.allclose(namespace["tokens"].mean(1), torch.zeros(()), atol=1e-5)  # behind a layer norm


def test_no_library_of_networks_is_imported_to_recognise_them() -> None:
    code = "import sys, vitclinic.anatomy; print({'timm', 'torchvision', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_an_unknown_network_is_observed_and_can_be_registered() -> None:
    observed = Anatomy.of(MyNet())
    assert observed.family == "MyNet"
    assert [unit.kind for unit in observed.units] == ["stem", "conv", "conv", "head"]
    register_family(documented_family())
    anatomy = Anatomy.of(Normalized(MyNet()))
    assert anatomy.family == "my nets"
    assert [unit.name for unit in anatomy.units] == ["stem", "blocks.0.conv", "blocks.1.conv", "head"]


def test_a_family_can_come_from_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("mypackage_family")
    module.FAMILY = documented_family()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mypackage_family", module)
    point = EntryPoint("my-nets", "mypackage_family:FAMILY", registry.ENTRY_POINTS)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [point] if group == "vitclinic.families" else [])
    plugins.load_entry_points.cache_clear()
    assert Anatomy.of(MyNet()).family == "my nets"


@pytest.mark.parametrize(
    "wrap",
    [
        Normalized,
        nn.DataParallel,
        partial(torch.compile, backend="eager"),
        lambda network: nn.DataParallel(torch.compile(Normalized(network), backend="eager")),
    ],
    ids=["normalised", "data parallel", "compiled", "all of them"],
)
def test_wrappers_are_looked_through(wrap: Any) -> None:
    network = tiny_vit()
    anatomy = Anatomy.of(wrap(network))
    assert anatomy.network is network


class Resized(nn.Module):
    """A wrapper that makes any image fit."""

    def __init__(self, backbone: nn.Module, size: tuple[int, int]) -> None:
        super().__init__()
        self.backbone, self.size = backbone, size

    def forward(self, x: Any) -> Any:
        return self.backbone(nn.functional.interpolate(x, self.size))


def test_an_example_goes_through_a_wrapper_that_resizes() -> None:
    network = tiny_vit()
    anatomy = Anatomy.of(Resized(network, tuple(network.patch_embed.img_size)), torch.rand(2, 3, 50, 70))
    assert anatomy.network is network


def test_a_network_under_ddp_is_read_through_its_wrapper(tmp_path: Path) -> None:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(Normalized(tiny_vit()))
        anatomy = Anatomy.of(wrapped)
        with taps({"x": anatomy.units[2].output}, grad=True) as seen:
            wrapped(torch.rand(2, 3, 32, 48))
        assert seen["x"].requires_grad
    finally:
        torch.distributed.destroy_process_group()


def test_a_post_norm_network_walked_as_pre_norm_is_an_error_that_names_the_unit() -> None:
    class Misread(timm.models.SwinTransformerV2):
        pass

    network = Misread(img_size=32, window_size=4, embed_dim=12, depths=(1, 1), num_heads=(2, 2), num_classes=5)
    name = f"{Misread.__module__}.{Misread.__qualname__}"
    register_family(Family("wrong", (name,), partial(swin.swin_units, post_norm=False), swin.swin_input_size))
    with pytest.raises(AnatomyError, match=r"in layers\.0\.blocks\.0\.msa the output is not skip \+ branch"):
        Anatomy.of(network)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_networks_of_other_precisions_can_be_examined(dtype: torch.dtype) -> None:
    assert Anatomy.of(shaken(tiny_vit()).to(dtype)).units


def test_blocks_give_surgery_its_attention_and_mlp() -> None:
    network = shaken(tiny_vit()).eval()
    anatomy = Anatomy.of(network)
    assert [block.name for block in anatomy.blocks] == ["blocks.0", "blocks.1"]
    for block in anatomy.blocks:
        msa, mlp = block.unit("msa"), block.unit("mlp")
        assert (anatomy.path(msa.module), anatomy.path(msa.norm)) == (
            f"{block.name}.attn",
            f"{block.name}.norm1",
        )
        assert block.unit("conv") is None
        anatomy.network.set_submodule(anatomy.path(mlp.module), nn.Sequential(mlp.module, nn.Dropout(0.1)))
    treated = Anatomy.of(network)
    assert isinstance(treated.unit("blocks.1.mlp").module, nn.Sequential)
    with pytest.raises(AnatomyError, match="create a new anatomy"):
        anatomy.path(nn.Identity())
    with pytest.raises(AnatomyError, match=r"no unit 'blocks\.1\.mpl'\. Did you mean 'blocks\.1\.mlp'"):
        treated.unit("blocks.1.mpl")


def test_another_image_size_needs_another_example() -> None:
    network = tiny_vit(dynamic_img_size=True).eval()
    images = torch.randn(1, 3, 64, 24)
    anatomy = Anatomy.of(network)
    site = anatomy.unit("blocks.0.msa").output
    with taps({"x": site}) as seen:
        network(images)
    # 24 tokens either way, so the size must be the one that was examined.
    assert anatomy.grid(site, seen["x"]).shape[-2:] == (4, 6)
    anatomy = Anatomy.of(network, example=images)
    assert anatomy.grid(anatomy.unit("blocks.0.msa").output, seen["x"]).shape[-2:] == (8, 3)
    larger = torch.randn(1, 1 + 99, 24)
    with pytest.raises(AnatomyError, match="99 spatial tokens do not fit"):
        anatomy.grid(site, larger)


def test_what_has_no_grid_or_cannot_be_removed_says_so() -> None:
    anatomy = Anatomy.of(tiny_vit())
    head, stem = anatomy.unit("head"), anatomy.unit("stem")
    with pytest.raises(AnatomyError, match="no grid"):
        anatomy.grid(head.output, torch.zeros(2, 5))
    with pytest.raises(AnatomyError, match="stem cannot be removed"):
        anatomy.remove(stem)
    with pytest.raises(AnatomyError, match="no prefix tokens"):
        anatomy.prefix(stem.output, torch.zeros(2, 4, 4, 3))


def test_a_bottleneck_is_removed_by_bypassing_its_conv() -> None:
    network = shaken(cut("resnet", "resnet50")).eval()
    anatomy = Anatomy.of(network)
    ways = [unit.removal.how for unit in anatomy.of_kind("conv")]
    assert ways == ["conv replaced by the identity"] * 2 + ["conv replaced by subsampling"] * 3
    for unit in anatomy.of_kind("conv"):
        caught: list[tuple[Tensor, Tensor]] = []
        with anatomy.remove(unit):
            conv = unit.module.conv2
            handle = conv.register_forward_hook(lambda _, args, out, seen=caught: seen.append((args[0], out)))
            network(torch.randn(1, 3, 64, 64))
            handle.remove()
        before, after = caught[0]
        step = conv.stride[0]
        assert torch.equal(after, before[..., ::step, ::step])
    basic = Anatomy.of(cut("resnet", "resnet18"))
    assert {unit.removal.how for unit in basic.of_kind("conv")} == {"branch set to zero"}


def test_removal_is_undone_on_exceptions() -> None:
    network = shaken(tiny_vit()).eval()
    anatomy = Anatomy.of(network)
    images = torch.randn(1, 3, 32, 48)
    whole = network(images)
    pointer = network.pos_embed.data_ptr()
    for unit in anatomy.units:
        if unit.removal:
            with pytest.raises(ZeroDivisionError), anatomy.remove(unit):
                raise ZeroDivisionError
            assert torch.equal(network(images), whole)
    assert network.pos_embed.data_ptr() == pointer


class Headed(nn.Module):
    """A user's own network: somebody's backbone and a head."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))


def test_a_backbone_with_a_head_of_its_own_is_no_wrapper() -> None:
    headed = Headed(tiny_vit())
    anatomy = Anatomy.of(headed, torch.rand(1, 3, 32, 48))
    assert anatomy.network is headed
    assert anatomy.of_kind("msa")[0].name == "backbone.blocks.0.msa"


@pytest.mark.parametrize(
    ("network", "norm"),
    [
        (lambda: tiny_vit(), "norm"),
        (lambda: tiny_vit(class_token=False, global_pool="avg"), None),
        (lambda: tiny_vit(class_token=False, global_pool="avg", fc_norm=False), "norm"),
        (lambda: cut("convnext", "convnext_tiny"), None),
        (lambda: cut("convnext", "convnext_tiny_hnf"), "norm_pre"),
        (lambda: cut("resnet", "resnet18"), None),
        (lambda: cut("mlp_mixer", "mixer_b16_224"), "norm"),
        (lambda: cut("swin_transformer", "swin_tiny_patch4_window7_224"), "norm"),
        (lambda: cut("volo", "volo_d1_224"), "norm"),
        (NETWORKS["torchvision vit"], "encoder.ln"),
        (NETWORKS["torchvision convnext"], None),
    ],
)
def test_the_norm_of_a_head_acts_on_the_last_state_or_there_is_none(network: Any, norm: str | None) -> None:
    network = shaken(network()).eval()
    anatomy = Anatomy.of(network)
    head = anatomy.unit("head")
    assert (None if head.norm is None else anatomy.path(head.norm)) == norm
    final = head.input if head.norm is None else out_of(head.norm, head.input.layout)  # as docs/anatomy.md says
    images = torch.randn(1, *recognise(network)[1].input_size(network))
    with torch.no_grad(), taps({"final": final, "last": head.input}) as seen:
        network(images)
    assert anatomy.grid(final, seen["final"]).shape == anatomy.grid(head.input, seen["last"]).shape
    assert torch.equal(seen["final"], seen["last"]) == (norm is None)


@pytest.mark.parametrize(
    ("build", "path"),
    [
        (lambda: tiny_vit(in_chans=1), "patch_embed.proj"),
        (lambda: cut("mlp_mixer", "mixer_b16_224"), "stem.proj"),
        (lambda: cut("pit", "pit_ti_224"), "patch_embed.conv"),
        (lambda: cut("swin_transformer", "swin_tiny_patch4_window7_224"), "patch_embed.proj"),
        (lambda: cut("volo", "volo_d1_224"), "patch_embed.proj"),
        (NETWORKS["torchvision vit"], "conv_proj"),
    ],
)
def test_a_patch_projection_may_be_several_convs(build: Any, path: str) -> None:
    network = shaken(build()).eval()
    before = Anatomy.of(network)
    old = network.get_submodule(path)
    first = nn.Conv2d(old.in_channels, 6, 3, padding=1)
    network.set_submodule(
        path, nn.Sequential(first, nn.GELU(), nn.Conv2d(6, old.out_channels, old.kernel_size, old.stride, old.padding))
    )
    anatomy = Anatomy.of(network)
    assert [unit.name for unit in anatomy.units] == [unit.name for unit in before.units]
    assert recognise(network)[1].input_size(network) == recognise(build())[1].input_size(build())
    assert any(parameter is first.weight for parameter in anatomy.unit("stem").module.parameters())
