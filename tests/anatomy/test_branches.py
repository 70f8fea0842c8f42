"""Branches side by side, states that go on beside each other, and blocks that are no modules."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.anatomy.test_strange_modules import WIDTH, Attention, Block, Net
from vitclinic.anatomy import Anatomy, taps
from vitclinic.training.layer_decay import parameter_levels


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))


class Branches(nn.Module):
    """A block with an attention, an MLP and two norms; `join` says how they are joined."""

    def __init__(self, join: Callable[[Branches, Tensor], Tensor]) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.mlp = Attention(), mlp()
        self.gamma = nn.Parameter(torch.full((WIDTH,), 0.3))
        self.join = join

    def forward(self, x: Tensor) -> Tensor:
        return self.join(self, x)

    def both(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.attn(self.n1(x)), self.mlp(self.n2(x))


SIDE_BY_SIDE: dict[str, Callable[[Branches, Tensor], Tensor]] = {
    "inner sum": lambda b, x: x + (b.attn(b.n1(x)) + b.mlp(b.n2(x))),
    "one norm": lambda b, x: x + (b.attn(y := b.n1(x)) + b.mlp(y)),
    "state last": lambda b, x: b.attn(b.n1(x)) + b.mlp(b.n2(x)) + x,
    "one by one": lambda b, x: x + b.attn(b.n1(x)) + b.mlp(b.n2(x)),
    "sum": lambda b, x: x + sum(b.both(x)),
    "stack": lambda b, x: x + torch.stack(b.both(x)).sum(0),
    "scaled": lambda b, x: x + b.gamma * sum(b.both(x)),
    "scaled one by one": lambda b, x: x + (b.gamma * b.attn(b.n1(x)) + 0.5 * b.mlp(b.n2(x))),
    "norm behind": lambda b, x: x + b.n2(b.attn(y := b.n1(x)) + b.mlp(y)),
    "lerp": lambda b, x: torch.lerp(x + b.attn(b.n1(x)), x + b.mlp(b.n2(x)), 0.3),
    "mean": lambda b, x: ((x + b.attn(b.n1(x))) + (x + b.mlp(b.n2(x)))) / 2,
    "weighed": lambda b, x: 0.7 * (x + b.attn(b.n1(x))) + 0.3 * (x + b.mlp(b.n2(x))),
}


class Reversible(nn.Module):
    """Two halves of the channels, each of which is changed by the other (RevNet, Reformer)."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = (nn.Sequential(nn.LayerNorm(WIDTH), part) for part in (Attention(), mlp()))

    def forward(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        left = left + self.attn(right)
        right = right + self.mlp(left)
        return torch.cat((left, right), -1)


class ReversibleNet(Net):
    def tokens(self, images: Tensor) -> Tensor:
        return super().tokens(images).repeat(1, 1, 2)

    def forward(self, images: Tensor) -> Tensor:
        x = self.tokens(images)
        for block in self.blocks:
            x = block(x)
        left, right = x.chunk(2, -1)
        return self.head((left + right).mean(1))


class TwoStreams(Net):
    """The same without joining the halves between blocks."""

    def forward(self, images: Tensor) -> Tensor:
        left = right = self.tokens(images)
        for block in self.blocks:
            left = left + block.attn(right)
            right = right + block.mlp(left)
        return self.head((left + right).mean(1))


class ParallelLists(nn.Module):
    """Attentions and MLPs in a list each; `take` says how they are taken out."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.patch, self.head = nn.Conv2d(3, WIDTH, 8, 8), nn.Linear(WIDTH, 5)
        self.attns, self.mlps = nn.ModuleList(), nn.ModuleList()
        for _ in range(depth):
            self.attns.append(nn.Sequential(nn.LayerNorm(WIDTH), Attention()))
            self.mlps.append(nn.Sequential(nn.LayerNorm(WIDTH), *mlp()))

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).mT
        for number in range(len(self.attns)):
            x = x + self.attns[number](x)
            x = x + self.mlps[number](x)
        return self.head(x.mean(1))


class OneList(ParallelLists):
    """Attentions and MLPs in turn in one list."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__(depth)
        self.layers = nn.ModuleList(part for pair in zip(self.attns, self.mlps, strict=True) for part in pair)
        del self.attns, self.mlps

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).mT
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x.mean(1))


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Wrapped(OneList):
    """Each attention and each MLP in a module that adds, two of them a layer."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__(depth)
        wrapped = [Residual(layer) for layer in self.layers]
        self.layers = nn.Sequential(*(nn.Sequential(*wrapped[2 * n : 2 * n + 2]) for n in range(depth)))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.layers(self.patch(images).flatten(2).mT).mean(1))


@pytest.fixture
def images() -> Tensor:
    return torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def kinds(anatomy: Anatomy) -> list[str]:
    return [unit.kind for unit in anatomy.units]


def silence(*layers: nn.Module) -> None:
    with torch.no_grad():
        for layer in layers:
            layer.weight.zero_()
            layer.bias.zero_()


@pytest.mark.parametrize("join", SIDE_BY_SIDE.values(), ids=SIDE_BY_SIDE)
def test_branches_side_by_side_are_units_that_are_removed_apart(
    join: Callable[[Branches, Tensor], Tensor], images: Tensor
) -> None:
    torch.manual_seed(0)
    network = Net(Branches(join), Branches(join)).eval()
    anatomy = Anatomy.of(network, images)
    assert kinds(anatomy) == ["stem", *("msa", "mlp") * 2, "head"]
    assert anatomy.notes == ()
    assert [unit.attention is not None for unit in anatomy.units[1:3]] == [True, False]
    with torch.no_grad():
        removed = {}
        for kind in ("msa", "mlp"):
            with anatomy.remove(anatomy.unit(f"blocks.0.{kind}")):
                removed[kind] = network(images)
        for kind, last in (("msa", network.blocks[0].attn.out), ("mlp", network.blocks[0].mlp[2])):
            kept = {name: value.clone() for name, value in last.state_dict().items()}
            silence(last)
            torch.testing.assert_close(removed[kind], network(images))
            last.load_state_dict(kept)
        with taps({"head": anatomy.unit("head").input}) as seen:
            logits = network(images)
        torch.testing.assert_close(network.head(seen["head"].mean(1)), logits)


@pytest.mark.parametrize("network", [ReversibleNet, TwoStreams])
def test_a_state_that_goes_on_beside_another_is_no_part_of_its_branch(network: type[Net], images: Tensor) -> None:
    torch.manual_seed(0)
    reversible = network(Reversible(), Reversible()).eval()
    anatomy = Anatomy.of(reversible, images)
    assert kinds(anatomy) == ["stem", *("msa", "mlp") * 2, "head"]
    assert [unit.attention is not None for unit in anatomy.units[1:3]] == [True, False]
    with torch.no_grad():
        for number, part in ((1, "attn"), (2, "mlp"), (3, "attn"), (4, "mlp")):
            with anatomy.remove(anatomy.units[number]):
                removed = reversible(images)
            silenced = network(Reversible(), Reversible()).eval()
            silenced.load_state_dict(reversible.state_dict())
            inner = getattr(silenced.blocks[(number - 1) // 2], part)[1]
            silence(inner.out if part == "attn" else inner[2])
            torch.testing.assert_close(removed, silenced(images))


@pytest.mark.parametrize("norms", ["in blocks", "in the network", "on other axes"])
def test_in_a_post_norm_network_every_state_is_read_behind_its_norm(norms: str, images: Tensor) -> None:
    def after_norm(block: Branches, x: Tensor) -> Tensor:
        if norms == "on other axes":
            x = block.n1((x + block.attn(x)).mT.mT)
            return block.n2((x + block.mlp(x)).mT.mT)
        x = block.n1(x + block.attn(x))
        return block.n2(x + block.mlp(x))

    class Inline(Net):
        def forward(self, images: Tensor) -> Tensor:
            x = self.tokens(images)
            for block in self.blocks:
                x = after_norm(block, x)
            return self.head(x.mean(1))

    network = (Inline if norms == "in the network" else Net)(Branches(after_norm), Branches(after_norm)).eval()
    anatomy = Anatomy.of(network, images)
    assert anatomy.unit("head").norm is None
    units = anatomy.of_kind("msa", "mlp")
    with torch.no_grad(), taps({unit.name: unit.output for unit in units}) as seen:
        network(images)
    assert len(units) == 4
    for unit in units:  # of new weights, a LayerNorm's output has mean 0 and variance 1
        torch.testing.assert_close(seen[unit.name].var(-1, correction=0), torch.ones(4, 16), atol=1e-3, rtol=0)


def test_the_last_norm_of_a_pre_norm_network_is_the_heads(images: Tensor) -> None:
    class Final(Net):
        def __init__(self) -> None:
            super().__init__(Block(), Block())
            self.norm = nn.LayerNorm(WIDTH)

        def forward(self, images: Tensor) -> Tensor:
            x = self.tokens(images)
            for block in self.blocks:
                x = x + block.attn(block.norm1(x))
                x = x + block.mlp(block.norm2(x))
            return self.head(self.norm(x).mean(1))

    network = Final()
    assert Anatomy.of(network, images).unit("head").norm is network.norm


@pytest.mark.parametrize(
    ("network", "blocks"),
    [
        (ParallelLists, ["attns.0+mlps.0", "attns.1+mlps.1", "attns.2+mlps.2"]),
        (OneList, ["layers.0+layers.1", "layers.2+layers.3", "layers.4+layers.5"]),
        (Wrapped, ["layers.0", "layers.1", "layers.2"]),
    ],
)
def test_an_attention_and_the_mlp_after_it_are_one_block(
    network: type[nn.Module], blocks: list[str], images: Tensor
) -> None:
    anatomy = Anatomy.of(network().eval(), images)
    assert [block.name for block in anatomy.blocks] == blocks
    assert [[unit.kind for unit in block.units] for block in anatomy.blocks] == [["msa", "mlp"]] * 3
    levels = set(parameter_levels(anatomy).values())
    assert len(levels) == 5  # stem, three blocks, head


def test_a_pointwise_convolution_between_residual_blocks_is_an_mlp_of_the_block(images: Tensor) -> None:
    def block() -> nn.Sequential:
        spatial = nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH), nn.GELU(), nn.BatchNorm2d(WIDTH))
        return nn.Sequential(Residual(spatial), nn.Conv2d(WIDTH, WIDTH, 1), nn.GELU(), nn.BatchNorm2d(WIDTH))

    network = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, WIDTH, 8, 8), nn.GELU(), nn.BatchNorm2d(WIDTH)),
        *(block(), block()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, 5)),
    ).eval()
    anatomy = Anatomy.of(network, images)
    assert [(unit.name, unit.block) for unit in anatomy.units[1:-1]] == [
        *(("1.0.conv", "1"), ("1.1.mlp", "1"), ("2.0.conv", "2"), ("2.1.mlp", "2")),
    ]
    with torch.no_grad():
        for number in (1, 2):
            with anatomy.remove(anatomy.unit(f"{number}.1.mlp")):
                removed = network(images)
            state = network[0](images)
            for other in (1, 2):
                state = network[other][0](state)
                state = state if other == number else network[other][1](state)
                state = network[other][2:](state)
            torch.testing.assert_close(removed, network[3:](state))
