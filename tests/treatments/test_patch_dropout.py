"""Patch dropout: against timm's own, against blocks called on chosen tokens, and in company."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from tests.anatomy.networks import NETWORKS, shaken
from tests.anatomy.zoo import ZOO
from tests.treatments.handwritten import OwnViT, families_of_handwritten_networks
from vitclinic._core.distributed import ALONE
from vitclinic._core.errors import TreatmentError
from vitclinic.anatomy import Anatomy
from vitclinic.data import ImageSpec, open_data
from vitclinic.training import build_recipe
from vitclinic.training.trainer import Trainer
from vitclinic.treatments import PatchDropout, treat, treatments_of

RATE = {"patch_dropout": {"rate": 0.6}}
IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def vit(**keywords: Any) -> Any:
    torch.manual_seed(0)
    small = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2, "num_classes": 5}
    return shaken(timm.models.VisionTransformer(**{**small, **keywords})).eval()


def drawn(images: int, patches: int, keep: int) -> Tensor:
    """The kept patches of each image as timm draws them, in order."""
    return torch.randn(images, patches).argsort(dim=1)[:, :keep].sort(dim=1).values


def logits(network: nn.Module, x: Tensor) -> Tensor:
    output = network(x)
    return output if isinstance(output, Tensor) else output.logits


NETWORKS_AND_BLOCKS = {
    "timm": (vit, "blocks.0", 1, 0),
    "timm, registers": (lambda: vit(reg_tokens=2), "blocks.0", 3, 0),
    "timm, mean of patches": (lambda: vit(class_token=False, global_pool="avg"), "blocks.0", 0, 0),
    "torchvision": (lambda: shaken(NETWORKS["torchvision vit"]()), "encoder.layers.encoder_layer_0", 1, 0),
    "Hugging Face": (lambda: shaken(NETWORKS["huggingface vit"]()), None, 1, 0),
    "own": (OwnViT, "blocks.0", 1, 0),
    "own, [N, B, D]": (ZOO["hand-written/sequence_first_vit"].awake, "resblocks.0", 1, 1),
    "own, nested": (ZOO["hand-written/linear_patch_vit"].awake, "transformer", 1, 0),
}


@pytest.mark.parametrize("name", NETWORKS_AND_BLOCKS)
def test_the_blocks_see_the_kept_patches_alone(name: str) -> None:
    """Against the untreated network, with tokens chosen by an index where they enter the first block."""
    build, path, prefix, batch_axis = NETWORKS_AND_BLOCKS[name]
    if name.startswith("Hugging") and "huggingface vit" not in NETWORKS:
        pytest.skip("needs transformers")
    network = build().eval()
    with families_of_handwritten_networks():
        treated = treat(copy.deepcopy(network), RATE, spec=ImageSpec(5, 3, _size(network)))
        path = path or Anatomy.of(network).of_kind("msa")[0].block
    x = torch.randn(3, 3, *_size(network), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(logits(treated, x), logits(network, x))  # in evaluation nothing is dropped

    def choose(module: nn.Module, args: Any) -> Any:
        tokens = args[0].movedim(batch_axis, 0)
        count = tokens.shape[1] - prefix
        keep = drawn(3, count, int(count * 0.4)) + prefix
        rows = torch.cat((torch.arange(prefix).expand(3, -1), keep), dim=1)
        return (tokens[torch.arange(3)[:, None], rows].movedim(0, batch_axis), *args[1:])

    network.get_submodule(path).register_forward_pre_hook(choose)
    torch.manual_seed(5)
    expected = logits(network, x)
    torch.manual_seed(5)
    torch.testing.assert_close(logits(treated.train(), x), expected)
    assert set(treated.state_dict()) == set(network.state_dict())


def _size(network: nn.Module) -> tuple[int, int]:
    with families_of_handwritten_networks():
        from vitclinic.treatments import image_spec

        return image_spec(network).img_size


def test_it_is_timm_s_own() -> None:
    native, treated = vit(patch_drop_rate=0.6), treat(vit(), RATE)
    outputs = []
    for network in (native, treated):
        torch.manual_seed(3)
        outputs.append(network.train()(IMAGES))
    torch.testing.assert_close(outputs[1], outputs[0])


def test_every_patch_is_kept_as_often_and_every_image_has_its_own() -> None:
    drop = PatchDropout(0.25, prefix=2)
    tokens = torch.arange(18.0).expand(4000, 18)[..., None]
    torch.manual_seed(0)
    kept = drop(tokens)[..., 0]
    assert kept.shape == (4000, 2 + 12)
    assert (kept[:, :2] == torch.tensor([0.0, 1.0])).all()
    assert (kept.diff(dim=1) > 0).all()
    shares = torch.stack([(kept == patch).any(dim=1).float().mean() for patch in range(2, 18)])
    assert (shares - 0.75).abs().max() < 4 * (0.75 * 0.25 / 4000) ** 0.5
    assert len({tuple(row) for row in kept.tolist()}) > 1000


@pytest.mark.parametrize("rate", [0.0, 0.01])
def test_a_rate_that_drops_nothing_changes_nothing(rate: float) -> None:
    """All 16 patches are there if the rate is 0; 0.01 of them is one."""
    network = vit()
    treated = treat(copy.deepcopy(network), {"patch_dropout": {"rate": rate}}).train()
    difference = (treated(IMAGES) - network(IMAGES)).abs().max()
    assert difference <= 1e-5 if rate == 0 else difference > 1e-3


def test_gradients_reach_the_kept_patches_and_no_others() -> None:
    treated = treat(vit(), RATE).train()
    torch.manual_seed(9)
    treated(IMAGES[:1]).square().sum().backward()
    torch.manual_seed(9)
    kept = {int(patch) + 1 for patch in drawn(1, 16, 6)[0]}
    learning = treated.pos_embed.grad[0].abs().sum(dim=-1).nonzero().flatten().tolist()
    assert set(learning) == {0} | kept


def test_checkpointed_blocks_drop_the_same_patches_twice() -> None:
    plain, checkpointed = (treat(vit(), RATE).train() for _ in range(2))
    checkpointed.set_grad_checkpointing(True)
    for network in (plain, checkpointed):
        torch.manual_seed(2)
        network(IMAGES).square().sum().backward()
    for ours, theirs in zip(checkpointed.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_a_second_pass_of_a_step_repeats_the_draw_and_another_batch_has_its_own() -> None:
    model = {"name": "vit_tiny_fitted", "patch_size": 2, "embed_dim": 12, "depth": 2, "num_heads": 2}
    data = {"source": "digits", "limit": 64, "augment": "none"}
    recipe = build_recipe({"model": model, "data": data, "treatments": [RATE], "batch_size": 8, "workers": 0})
    trainer = Trainer(recipe, open_data(recipe.data), 4, ALONE, torch.device("cpu"))
    batch = trainer.stream[range(8)]
    first, again = (trainer.passes(batch)["task"] for _ in range(2))
    assert torch.equal(first, again)
    other = trainer.stream[range(8)]
    keys = other.keys + 1
    assert not torch.equal(trainer.passes(type(other)(other.images, other.targets, other.indices, keys))["task"], first)


def test_a_compiled_network_drops_them_as_well() -> None:
    treated = treat(vit(), RATE).train()
    compiled = torch.compile(treated, backend="eager")
    torch.manual_seed(2)
    expected = treated(IMAGES)
    torch.manual_seed(2)
    torch.testing.assert_close(compiled(IMAGES), expected)


@pytest.mark.parametrize("others", [["gap_head"], ["registers"], ["gap_head", "registers"], ["conv_stem"]])
def test_after_other_treatments_all_prefix_tokens_stay(others: list[str]) -> None:
    treated = treat(vit(), *others, RATE).train()
    seen: list[int] = []
    treated.blocks[1].register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
    assert treated(IMAGES).isfinite().all()
    prefix = ("gap_head" not in others) + 4 * ("registers" in others)
    assert seen == [prefix + 6]
    assert treated.patch_dropout.num_prefix_tokens == prefix


@pytest.mark.parametrize("other", ["extra_block", "talking_heads", "context_broadcasting", "ffn_variant", "conv_stem"])
def test_before_other_treatments(other: str) -> None:
    assert treat(vit(), RATE, other).train()(IMAGES).isfinite().all()


@pytest.mark.parametrize(
    ("order", "sentence"),
    [
        (["patch_dropout", "gap_head"], r"List gap_head before patch_dropout"),
        (["patch_dropout", "registers"], r"List registers before patch_dropout"),
        (["patch_dropout", "local_attention"], r"local_attention needs the whole grid"),
        (
            ["local_attention", "patch_dropout"],
            r"patch_dropout does not fit VisionTransformer: .* know a patch by its place",
        ),
    ],
)
def test_an_order_that_does_not_work_is_a_sentence_and_changes_nothing(order: list[str], sentence: str) -> None:
    network = treat(vit(), order[0])
    expected, before = network(IMAGES), str(network)
    with pytest.raises(TreatmentError, match=sentence):
        treat(network, order[1])
    assert str(network) == before
    assert treatments_of(network) == (order[0],)
    assert torch.equal(network(IMAGES), expected)


def test_patch_losses_that_need_every_patch_are_refused_before_training() -> None:
    model = {"name": "vit_tiny_fitted", "patch_size": 2, "embed_dim": 12, "depth": 2, "num_heads": 2}
    recipe = {"model": model, "data": {"source": "digits", "limit": 64}, "batch_size": 8, "workers": 0}

    def trainer(options: dict[str, float]) -> Trainer:
        treatments = [RATE, {"patch_diversity": options}]
        made = build_recipe({**recipe, "treatments": treatments})
        return Trainer(made, open_data(made.data), 4, ALONE, torch.device("cpu"))

    for options in ({}, {"contrastive": 0.0}, {"mixing": 0.0}, {"cosine": 0.0, "mixing": 0.0}):
        with pytest.raises(
            TreatmentError, match="patch_diversity: the contrastive and the mixing loss need every patch"
        ):
            trainer(options)
    assert trainer({"contrastive": 0.0, "mixing": 0.0}).advance()["losses"]["patch_cosine"] > 0


class RotaryBlock(nn.Module):
    """A block whose attention turns queries and keys by their place in the sequence, however long that is."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        angle = torch.arange(x.shape[1], device=x.device)[:, None] / 3.0
        half = q.shape[-1] // 2
        q, k = (
            torch.cat(
                (
                    y[..., :half] * angle.cos() - y[..., half:] * angle.sin(),
                    y[..., :half] * angle.sin() + y[..., half:] * angle.cos(),
                ),
                dim=-1,
            )
            for y in (q, k)
        )
        x = x + self.proj(torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, dim=-1) @ v)
        return x + self.mlp(self.norm2(x))


class RotaryViT(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.patches, self.pos = nn.Conv2d(3, width, 8, 8), nn.Parameter(torch.randn(16, width))
        self.blocks = nn.ModuleList(RotaryBlock(width) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.pos
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(dim=1))


def test_blocks_that_count_places_are_refused_although_they_would_run() -> None:
    torch.manual_seed(0)
    network = shaken(RotaryViT())
    before = str(network)
    with pytest.raises(TreatmentError, match=r"RotaryViT: .* know a patch by its place in the sequence"):
        treat(network, "patch_dropout", spec=ImageSpec(5, 3, (32, 32)))
    assert str(network) == before
