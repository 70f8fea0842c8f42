"""Skips around several blocks, states on no grid, and networks of several streams."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.anatomy.test_branches import mlp
from tests.anatomy.test_strange_modules import WIDTH, Attention, Block, Net
from tests.anatomy.zoo import ZOO
from vitclinic.anatomy import Anatomy, record_attention

IMAGES = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def kinds(anatomy: Anatomy) -> list[str]:
    return [unit.kind for unit in anatomy.units]


def check_removals(anatomy: Anatomy, network: nn.Module) -> None:
    """Every unit that is said to be removable is: with it the outputs differ, and after it they come back."""
    with torch.no_grad():
        whole = network(IMAGES)
        for unit in anatomy.units:
            if unit.removal is not None:
                with anatomy.remove(unit):
                    assert not torch.equal(network(IMAGES), whole), unit
        assert torch.equal(network(IMAGES), whole)


def test_a_skip_around_blocks_is_no_unit_and_their_maps_are_not_heads_of_one() -> None:
    class Group(nn.Module):
        """x + Linear(blocks(x)), as in SwinIR."""

        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.last = nn.Sequential(Block(), Block()), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.last(self.blocks(x))

    network = Net(Group(), Group()).eval()
    anatomy = Anatomy.of(network, IMAGES)
    assert kinds(anatomy) == ["stem", *("msa", "mlp") * 4, "head"]
    assert len(anatomy.blocks) == 4
    maps = []
    with torch.no_grad(), record_attention(anatomy.of_kind("msa"), maps.append):
        network(IMAGES)
    applied = [block.attn.applied for group in network.blocks for block in group.blocks]
    for seen, expected in zip(maps, applied, strict=True):
        torch.testing.assert_close(seen.weights, expected)
    check_removals(anatomy, network)


class Encoder(nn.Module):
    """Down a U and up again, with sums across; `residual` makes its parts residual blocks."""

    def __init__(self, residual: bool) -> None:
        super().__init__()

        def part() -> nn.Module:
            return Bottleneck() if residual else nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())

        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.down, self.bottom, self.up = (nn.Sequential(part(), part()) for _ in range(3))
        self.smaller, self.larger = nn.Conv2d(8, 8, 2, 2), nn.ConvTranspose2d(8, 8, 2, 2)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.down(self.stem(x))
        coarse = self.bottom(self.smaller(fine))
        return self.head(self.up(fine + self.larger(coarse)).mean((2, 3)))


class Bottleneck(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.second(F.relu(self.first(x))))


def test_a_sum_across_a_u_is_no_unit() -> None:
    for residual in (True, False):
        network = Encoder(residual).eval()
        anatomy = Anatomy.of(network, IMAGES)
        assert sum(unit.residual is not None for unit in anatomy.units) == (6 if residual else 0)
        assert {anatomy.output_grid(unit) for unit in anatomy.of_kind("conv")} == {(32, 32), (16, 16)}
        names = {unit.name.partition(".")[0] for unit in anatomy.of_kind("conv")}
        assert names >= {"down", "bottom", "up"}
        check_removals(anatomy, network)


def test_a_gate_between_state_and_branch_is_told_as_no_residual() -> None:
    class Highway(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn, self.gate = Attention(), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            gate = self.gate(x).sigmoid()
            return gate * self.attn(x) + (1 - gate) * x

    anatomy = Anatomy.of(Net(Highway(), Highway()).eval(), IMAGES)
    assert kinds(anatomy) == ["stem", "msa", "msa", "head"]
    assert not any(unit.residual for unit in anatomy.units)
    assert any("no residual addition was seen at blocks.0.msa, blocks.1.msa" in note for note in anatomy.notes)


def test_latents_that_read_the_image_are_units_on_no_grid() -> None:
    class Perceiver(Net):
        def __init__(self) -> None:
            super().__init__(Block(), Block())
            self.latents = nn.Parameter(torch.randn(1, 7, WIDTH))
            self.cross = nn.ModuleList(nn.MultiheadAttention(WIDTH, 2, batch_first=True) for _ in range(2))

        def forward(self, images: Tensor) -> Tensor:
            x = self.tokens(images)
            latents = self.latents.expand(len(images), -1, -1)
            for cross, block in zip(self.cross, self.blocks, strict=True):
                latents = block(latents + cross(latents, x, x)[0])
            return self.head(latents.mean(1))

    network = Perceiver().eval()
    anatomy = Anatomy.of(network, IMAGES)
    assert [unit.kind for unit in anatomy.units if unit.residual] == ["msa", "msa", "mlp"] * 2
    assert any("are not features on a grid" in note for note in anatomy.notes)
    check_removals(anatomy, network)


def test_tokens_of_two_scales_side_by_side_are_units_on_no_grid() -> None:
    class Scales(Net):
        def __init__(self) -> None:
            super().__init__(Block(), Block())
            self.coarse = nn.Conv2d(3, WIDTH, 16, 16)

        def tokens(self, images: Tensor) -> Tensor:
            return torch.cat((super().tokens(images), self.coarse(images).flatten(2).mT), 1)

    network = Scales().eval()
    anatomy = Anatomy.of(network, IMAGES)
    assert [unit.kind for unit in anatomy.units if unit.residual] == ["msa", "mlp"] * 2
    assert any("are not features on a grid" in note for note in anatomy.notes)
    check_removals(anatomy, network)


def test_two_streams_that_only_the_head_joins_are_told() -> None:
    class Streams(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right, self.head = Net(Block()), Net(Block()), nn.Linear(10, 5)

        def forward(self, images: Tensor) -> Tensor:
            return self.head(torch.cat((self.left(images), self.right(images.flip(-1))), -1))

    network = Streams().eval()
    anatomy = Anatomy.of(network, IMAGES)
    assert kinds(anatomy) == ["stem", *("msa", "mlp") * 2, "head"]
    told = "the head also reads the state after left.blocks.0.mlp, which goes on beside that of right.blocks.0.mlp."
    assert told in anatomy.notes
    check_removals(anatomy, network)


def test_experts_that_are_added_are_one_unit() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.experts = nn.Linear(WIDTH, 3), nn.ModuleList(mlp() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            weights = self.gate(x).softmax(-1).unbind(-1)
            return sum(w[..., None] * expert(x) for w, expert in zip(weights, self.experts, strict=True))

    block = Block()
    block.mlp = Experts()
    anatomy = Anatomy.of(Net(block).eval(), IMAGES)
    assert kinds(anatomy) == ["stem", "msa", "mlp", "head"]
    check_removals(anatomy, anatomy.network)


def test_a_decoder_whose_queries_have_not_seen_the_image_has_units() -> None:
    class Decoder(Net):
        def __init__(self) -> None:
            super().__init__()
            self.queries = nn.Parameter(torch.randn(1, 3, WIDTH))
            self.transformer = nn.Transformer(WIDTH, 2, 1, 2, 32, batch_first=True)

        def forward(self, images: Tensor) -> Tensor:
            queries = self.queries.expand(len(images), -1, -1)
            return self.head(self.transformer(self.tokens(images), queries).mean(1))

    network = Decoder().eval()
    anatomy = Anatomy.of(network, IMAGES)
    # The first decoder layer's attention among its queries does not depend on the image.
    assert [unit.kind for unit in anatomy.units if unit.residual] == ["msa", "mlp", "msa", "mlp", "msa", "msa", "mlp"]
    check_removals(anatomy, network)


def test_queries_and_keys_that_are_rotated_by_position_are_no_blocks() -> None:
    """x cos + rotate(x) sin is a sum of a state and of what is computed from it, too, without weights."""
    entry = ZOO["timm/eva02_tiny_patch14_224"]
    anatomy = Anatomy.of(entry.awake(), entry.images())
    assert kinds(anatomy) == ["stem", "position", *("msa", "mlp") * 2, "head"]
    assert all(unit.attention for unit in anatomy.of_kind("msa"))


def test_a_strided_block_of_several_convolutions_is_one_unit() -> None:
    """Its layers before the stride see a finer grid than its sum; one across a U sees coarser ones."""

    class Strided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convs = nn.Sequential(*(nn.Sequential(nn.Conv2d(8, 8, 3, 1, 1), nn.ReLU()) for _ in range(3)))
            self.pool, self.skip = nn.MaxPool2d(2), nn.Conv2d(8, 8, 1, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.skip(x) + self.pool(self.convs(x))

    layers = (nn.Conv2d(3, 8, 3, 1, 1), nn.ReLU(), Strided(), Strided(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    network = nn.Sequential(*layers, nn.Linear(8, 10)).eval()
    anatomy = Anatomy.of(network, IMAGES)
    assert kinds(anatomy) == ["stem", "conv", "conv", "head"]
    assert all(unit.residual is not None for unit in anatomy.of_kind("conv"))
    check_removals(anatomy, network)
