"""Attention and residuals in code of unusual make: parts that observation once missed, or claimed without reason."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vitclinic
from tests.anatomy.test_strange_modules import HEADS, WIDTH, Attention, Block, Net, images, kinds
from vitclinic._core.errors import AnatomyError, TreatmentError
from vitclinic.anatomy import Anatomy, record_attention, taps
from vitclinic.data import ImageSpec

_ = images  # a fixture


class Rotary(Attention):
    """Queries and keys are turned by their positions, as complex numbers."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        angles = torch.arange(x.shape[1])[:, None] * 0.5 ** torch.arange(query.shape[-1] // 2)
        turn = torch.polar(torch.ones_like(angles), angles)
        pairs = (torch.view_as_complex(part.reshape(*part.shape[:-1], -1, 2)) * turn for part in (query, key))
        query, key = (torch.view_as_real(part).flatten(-2) for part in pairs)
        self.applied = (query @ key.mT).softmax(-1)
        return self.out((self.applied @ value).transpose(1, 2).flatten(2))


class Sink(Attention):
    """A score of zero beside those of the keys, so that a token may attend to nothing: rows sum to less than 1."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        scores = query @ key.mT
        weights = torch.cat((scores, torch.zeros_like(scores[..., :1])), -1).softmax(-1)[..., :-1]
        return self.out((weights @ value).transpose(1, 2).flatten(2))


class Linear(Attention):
    """Attention without a softmax, by features of queries and keys."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        query, key = F.elu(query) + 1, F.elu(key) + 1
        found = query @ (key.mT @ value) / (query @ key.sum(-2, keepdim=True).mT)
        return self.out(found.transpose(1, 2).flatten(2))


def test_a_rotation_by_complex_numbers_leaves_the_map(images: Tensor) -> None:
    network, seen = Net(Block(Rotary())).eval(), []
    anatomy = Anatomy.of(network, images)
    with record_attention(anatomy.of_kind("msa"), seen.append):
        network(images)
    torch.testing.assert_close(seen[0].weights, network.blocks[0].attn.applied)


def test_rows_that_sum_to_a_little_less_than_1_are_no_map(images: Tensor) -> None:
    network = Net(Block(Sink())).eval()
    with torch.no_grad():
        network.blocks[0].attn.qkv.weight[: 2 * WIDTH] = 0.0
        network.blocks[0].attn.qkv.bias[: 2 * WIDTH] = 0.72  # all scores are 8 * 0.72^2: rows miss 1 by a thousandth
    anatomy = Anatomy.of(network, images)
    assert [unit.attention for unit in anatomy.of_kind("msa")] == [None]
    assert anatomy.notes == (
        "no map can be recorded of the attention of blocks.0.msa: it is not one softmax over the same tokens of every "
        "image.",
    )


def test_zeros_shaped_like_a_state_are_no_state(images: Tensor) -> None:
    class Equilibrium(Net):
        """One block, again and again from zeros, with the tokens added each time."""

        def forward(self, images: Tensor) -> Tensor:
            x = self.tokens(images)
            state = torch.zeros_like(x)
            for _ in range(3):
                state = self.blocks[0](state + x)
            return self.head(state.mean(1))

    network = Equilibrium(Block()).eval()
    anatomy = Anatomy.of(network, images)
    assert kinds(anatomy) == ["stem", *["msa", "mlp"] * 3, "head"]
    whole = network(images)
    for unit in anatomy.units:
        if unit.removal is not None:
            with anatomy.remove(unit):
                assert not torch.equal(network(images), whole), unit.name


class ReadByToken(Net):
    """A class token that reads the patches behind the blocks, with no module around that."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__(*blocks)
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.query, self.keys, self.out = (nn.Linear(WIDTH, width) for width in (WIDTH, 2 * WIDTH, WIDTH))

    def forward(self, images: Tensor) -> Tensor:
        x = self.tokens(images)
        for block in self.blocks:
            x = block(x)
        token = self.token.expand(len(x), -1, -1)
        together = torch.cat((token, x), 1)
        key, value = self.keys(together).chunk(2, -1)
        self.applied = (self.query(together[:, :1]) @ key.mT).softmax(-1)
        token = token + self.out(self.applied @ value)
        return self.head(token[:, 0])


def test_a_token_that_has_not_seen_the_image_yet_reads_it_in_a_unit(images: Tensor) -> None:
    network, seen = ReadByToken(Block()).eval(), []
    anatomy = Anatomy.of(network, images)
    assert kinds(anatomy) == ["stem", "msa", "mlp", "msa", "head"]
    reading = anatomy.of_kind("msa")[-1]
    assert reading.residual is not None
    with record_attention((reading,), seen.append), taps(reading.residual.sites) as parts:
        network(images)
    torch.testing.assert_close(seen[0].weights[:, 0], network.applied)
    torch.testing.assert_close(parts["total"], parts["skip"] + parts["branch"])
    with anatomy.remove(reading):
        torch.testing.assert_close(network(images), network.head(network.token[0]).expand(len(images), -1))


class ByKeyword(Net):
    """Takes its images by the name that Hugging Face has for them, and by no other."""

    def forward(self, *, pixel_values: Tensor) -> dict[str, Any]:  # type: ignore[override]
        return {"logits": super().forward(pixel_values)}


@pytest.mark.parametrize("wrap", [lambda network: network, nn.DataParallel], ids=["plain", "parallel"])
def test_images_by_keyword_alone(wrap: Any) -> None:
    network = ByKeyword(Block())
    anatomy = Anatomy.of(wrap(network))  # without an example, too
    assert kinds(anatomy) == ["stem", "msa", "mlp", "head"]
    assert kinds(Anatomy.of(wrap(network), torch.rand(1, 3, 32, 32))) == kinds(anatomy)


@pytest.mark.parametrize("treatment", ["talking_heads", "registers", "conv_stem", "extra_block"])
def test_a_network_that_takes_images_by_keyword_is_treated(treatment: str) -> None:
    network = ByKeyword(Block())
    before = set(network.state_dict())
    treated = vitclinic.treat(network, {treatment: {}}, spec=ImageSpec(5, 3, (32, 32)))
    assert set(treated.state_dict()) != before
    assert treated(pixel_values=torch.rand(2, 3, 32, 32))["logits"].shape == (2, 5)


def test_a_pass_that_fails_has_no_second_error_beside_it(images: Tensor) -> None:
    class Breaks(Net):
        fails = False

        def forward(self, images: Tensor) -> Tensor:
            x = self.tokens(images)
            x = x + self.blocks[0](x).relu()
            if self.fails:
                raise ZeroDivisionError
            return self.head((x + self.blocks[1](x).relu()).mean(1))

    network = Breaks(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).eval()
    anatomy = Anatomy.of(network, images)
    network.fails, sites = True, anatomy.units[1].residual.sites
    with warnings.catch_warnings(record=True) as told, pytest.raises(ZeroDivisionError), taps(sites):
        network(images)
    assert not told


def test_an_extra_block_says_that_an_attention_without_a_map_has_no_heads() -> None:
    with pytest.raises(TreatmentError, match="no attention with a map to take its heads from; use kind mlp"):
        vitclinic.treat(Net(Block(Linear())), {"extra_block": {}}, spec=ImageSpec(5, 3, (32, 32)))


def test_a_torchscript_module_is_told() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch advises against it
        script = torch.jit.trace(Net(nn.ReLU()).eval(), torch.rand(1, 3, 32, 32))
    with pytest.raises(AnatomyError, match="is a TorchScript module, whose layers cannot be read"):
        Anatomy.of(script)


def test_colours_that_are_added_to_each_other_are_no_unit(images: Tensor) -> None:
    class Chroma(Net):
        """Begins with a change of colours, from red, green and blue to luma and chroma."""

        def tokens(self, images: Tensor) -> Tensor:
            red, green, blue = (images * 255).unbind(1)
            luma = red * 0.299 + green * 0.587 + blue * 0.114
            colours = torch.stack((luma, 0.564 * (blue - luma) + 128, 0.713 * (red - luma) + 128), 1)
            return super().tokens(colours)

    assert kinds(Anatomy.of(Chroma(Block()).eval(), images)) == ["stem", "msa", "mlp", "head"]


class Summed(Attention):
    """Values are weighed number by number and summed."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        weights = (query @ key.mT).softmax(-1)
        return self.out((weights[..., None] * value[:, :, None]).sum(-2).transpose(1, 2).flatten(2))


class Twice(Attention):
    """The map is applied two times."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        weights = (query @ key.mT).softmax(-1)
        return self.out((weights @ (weights @ value)).transpose(1, 2).flatten(2))


class Projected(Attention):
    """Linformer: a fixed matrix makes a few keys and values of all."""

    def __init__(self) -> None:
        super().__init__()
        self.few = nn.Parameter(torch.randn(3, 16) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        weights = (query @ (self.few @ key).mT).softmax(-1)
        return self.out((weights @ (self.few @ value)).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("make", [Summed, Twice, Projected])
def test_attention_without_one_map_is_attention_all_the_same_and_noted(make: type[Attention], images: Tensor) -> None:
    anatomy = Anatomy.of(Net(Block(make())).eval(), images)
    (unit,) = anatomy.of_kind("msa")
    assert unit.attention is None
    assert any("no map can be recorded" in note for note in anatomy.notes)
