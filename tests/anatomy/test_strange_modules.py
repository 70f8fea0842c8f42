"""Modules that are written otherwise than most: what is said of them is right, or is not said."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from vitclinic._core.errors import AnatomyError
from vitclinic.anatomy import Anatomy, record_attention, taps

WIDTH, HEADS = 16, 2


class Attention(nn.Module):
    """Plain attention; `after` changes its map."""

    def __init__(self, after: Callable[[Tensor], Tensor] = lambda weights: weights) -> None:
        super().__init__()
        self.qkv, self.out, self.after = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), after

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        self.applied = self.after((query @ key.mT).softmax(-1))
        return self.out((self.applied @ value).transpose(1, 2).flatten(2))


class QueriesFirst(Attention):
    """Attention whose map is [B, Q, H, K]."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
        weights = torch.einsum("bqhd,bkhd->bqhk", query, key).softmax(-1)
        self.applied = weights.transpose(1, 2)
        return self.out(torch.einsum("bqhk,bkhd->bqhd", weights, value).flatten(2))


class KeysFirst(Attention):
    """Attention whose map is [B, H, K, Q], as some code has it that works on columns."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 4, 1)
        weights = (key.mT @ query).softmax(-2)
        self.applied = weights.mT
        return self.out((value @ weights).flatten(1, 2).mT)


class HeadByHead(Attention):
    """Attention with a softmax for each head; `cascade` gives each head what the one before it found as well."""

    def __init__(self, cascade: float = 0.0) -> None:
        super().__init__()
        self.cascade = cascade

    def forward(self, x: Tensor) -> Tensor:
        found: list[Tensor] = []
        maps = []
        for query, key, value in zip(*(part.chunk(HEADS, -1) for part in self.qkv(x).chunk(3, -1)), strict=True):
            start = query + self.cascade * found[-1] if found and self.cascade else query
            maps.append((start @ key.mT).softmax(-1))
            found.append(maps[-1] @ value)
        self.applied = torch.stack(maps, 1)
        return self.out(torch.cat(found, -1))


class InTurn(Attention):
    """Two attentions one after the other, with nothing between them."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


class OverQueries(Attention):
    """Slots that compete for tokens: the softmax is over queries."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.out(((query @ key.mT).softmax(-2) @ value).transpose(1, 2).flatten(2))


class Rectified(Attention):
    """Attention without a softmax whose rows sum to 1."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        scores = (query @ key.mT).relu() + 1e-3
        self.applied = scores / scores.sum(-1, keepdim=True)
        return self.out((self.applied @ value).transpose(1, 2).flatten(2))


def add(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def add_in_place(x: Tensor, y: Tensor) -> Tensor:
    y = y * 1.0
    y.add_(x)
    return y


class Block(nn.Module):
    def __init__(self, mixer: nn.Module | None = None, join: Callable[[Tensor, Tensor], Tensor] = add) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = mixer or Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
        self.join = join

    def forward(self, x: Tensor) -> Tensor:
        x = self.join(x, self.attn(self.norm1(x)))
        return self.join(x, self.mlp(self.norm2(x)))


class Net(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.patch, self.blocks, self.head = nn.Conv2d(3, WIDTH, 8, 8), nn.ModuleList(blocks), nn.Linear(WIDTH, 5)

    def tokens(self, images: Tensor) -> Tensor:
        return self.patch(images).flatten(2).mT

    def forward(self, images: Tensor) -> Tensor:
        x = self.tokens(images)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


@pytest.fixture
def images() -> Tensor:
    return torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def kinds(anatomy: Anatomy) -> list[str]:
    return [unit.kind for unit in anatomy.units]


@pytest.mark.parametrize(
    "join",
    [
        add,
        add_in_place,
        lambda x, y: sum([x, y]),
        lambda x, y: torch.add(x, other=y),
        lambda x, y: torch.add(input=x, other=y * 1.0),
        lambda x, y: y * 1.0 + x,
        lambda x, y: x - y,
        lambda x, y: x.clone().sub_(y),
        lambda x, y: torch.add(x, y, alpha=0.5),
        lambda x, y: torch.lerp(x, x + y, 0.5),
        lambda x, y: torch.addcmul(x, y, torch.tensor(0.7)),
        lambda x, y: torch.addcmul(input=x, tensor1=y, tensor2=torch.tensor(0.7)),
        lambda x, y: x.clone().addcmul_(y, torch.full((WIDTH,), 0.7)),
        lambda x, y: torch.stack((y, x)).sum(0),
        lambda x, y: torch.stack([x, y], dim=-1).sum(dim=-1),
        lambda x, y: torch.baddbmm(x, y, torch.eye(WIDTH).expand(len(x), -1, -1)),
    ],
    ids=[
        "+",
        "add_",
        "sum",
        "other=",
        "input=",
        "right",
        "-",
        "sub_",
        "alpha",
        "lerp",
        "addcmul",
        "named",
        "addcmul_",
        "stack",
        "last",
        "baddbmm",
    ],
)
def test_a_removed_branch_is_as_if_its_last_layer_were_zero(join: Callable[..., Tensor], images: Tensor) -> None:
    network = Net(Block(join=join), Block(join=join)).eval()
    anatomy = Anatomy.of(network, images)
    assert kinds(anatomy) == ["stem", *("msa", "mlp") * 2, "head"]
    with torch.no_grad():
        with anatomy.remove(anatomy.units[2]):
            removed = network(images)
        network.blocks[0].mlp[2].weight.zero_()
        network.blocks[0].mlp[2].bias.zero_()
        assert torch.allclose(removed, network(images), atol=1e-6)


class Blended(Block):
    """Its MLP's sum is blended with the state before it."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return torch.lerp(x, x + self.mlp(self.norm2(x)), 0.3)


def test_a_state_blended_with_a_sum_that_contains_it_is_no_step_of_its_own(images: Tensor) -> None:
    network = Net(Blended(), Blended()).eval()
    anatomy = Anatomy.of(network, images)
    assert kinds(anatomy) == ["stem", *("msa", "mlp") * 2, "head"]
    with torch.no_grad():
        with anatomy.remove(anatomy.unit("blocks.0.msa")):
            removed = network(images)
        network.blocks[0].attn.out.weight.zero_()
        network.blocks[0].attn.out.bias.zero_()
        assert torch.allclose(removed, network(images), atol=1e-6)


class Highway(Block):
    """Its attention and its state share what a gate gives."""

    def forward(self, x: Tensor) -> Tensor:
        gate = x.mean(-1, keepdim=True).sigmoid()
        x = (1 - gate) * x + gate * self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def test_an_attention_before_the_first_sum_is_no_part_of_the_stem(images: Tensor) -> None:
    anatomy = Anatomy.of(Net(Highway(), Highway()).eval(), images)
    assert kinds(anatomy) == ["stem", *("msa", "mlp") * 2, "head"]
    assert all(unit.attention for unit in anatomy.of_kind("msa"))


def keep_largest(weights: Tensor) -> Tensor:
    kept = weights * (weights >= weights.topk(4, -1).values[..., -1:])
    return kept / kept.sum(-1, keepdim=True)


@pytest.mark.parametrize(
    "attention",
    [
        Attention(),
        QueriesFirst(),
        KeysFirst(),
        HeadByHead(),
        HeadByHead(cascade=0.5),
        Attention(keep_largest),
        Attention(lambda weights: 0.3 * weights + 0.7 * torch.eye(16)),
        Rectified(),
    ],
    ids=["plain", "queries first", "keys first", "by head", "cascade", "largest", "gated", "rectified"],
)
def test_the_map_is_what_the_values_are_multiplied_with(attention: Attention, images: Tensor) -> None:
    network = Net(Block(attention)).eval()
    units = Anatomy.of(network, images).of_kind("msa")
    for grad in (False, True):
        found = []
        with record_attention(units, found.append, grad=grad):
            output = network(images)
        (seen,) = found
        torch.testing.assert_close(seen.weights, attention.applied.detach())
        assert seen.visible().all()
    gradients = torch.autograd.grad(output.square().sum(), seen.source, retain_graph=True)
    arranged = seen.arrange(gradients)
    assert arranged.shape == seen.weights.shape
    # Down a map's gradient the output falls, by the square of its length.
    step = sum((g * g).sum() for g in gradients)
    torch.testing.assert_close(arranged.square().sum(), step)
    assert arranged.abs().amax((0, 2, 3)).min() > 0


@pytest.mark.parametrize(
    "attention",
    [Attention(lambda weights: weights + torch.eye(16)), InTurn(), OverQueries()],
    ids=["identity added", "in turn", "over queries"],
)
def test_a_softmax_that_is_not_the_map_is_not_recorded(attention: nn.Module, images: Tensor) -> None:
    anatomy = Anatomy.of(Net(Block(attention)).eval(), images)
    (unit,) = anatomy.of_kind("msa")
    assert unit.attention is None
    assert any("no map can be recorded" in note for note in anatomy.notes)


def test_talking_heads_are_told_and_their_maps_are_those_before(images: Tensor) -> None:
    class Talking(Attention):
        def __init__(self) -> None:
            super().__init__(self.talk)
            self.mix = nn.Linear(HEADS, HEADS)

        def talk(self, weights: Tensor) -> Tensor:
            self.before = weights
            return self.mix(weights.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    attention = Talking()
    network = Net(Block(attention)).eval()
    anatomy = Anatomy.of(network, images)
    found = []
    with torch.no_grad(), record_attention(anatomy.of_kind("msa"), found.append):
        network(images)
    torch.testing.assert_close(found[0].weights, attention.before)
    assert anatomy.notes == ("the heads of blocks.0.msa are mixed after the softmax; maps are those before.",)


def test_weights_that_vanish_for_some_images_are_no_mask(images: Tensor) -> None:
    class Peaked(Attention):
        def forward(self, x: Tensor) -> Tensor:
            query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            scores = query @ key.mT
            scores = scores.masked_fill(scores < scores.topk(3, -1).values[..., -1:], -torch.inf)
            return self.out((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))

    network = Net(Block(Peaked())).eval()
    found = []
    with torch.no_grad(), record_attention(Anatomy.of(network, images).of_kind("msa"), found.append):
        network(images)
    assert found[0].visible().all()


def test_a_long_skip_is_no_unit(images: Tensor) -> None:
    class LongSkip(Net):
        def forward(self, images: Tensor) -> Tensor:
            first = self.blocks[0](self.tokens(images))
            return self.head(self.blocks[2](self.blocks[1](first) + first).mean(1))

    anatomy = Anatomy.of(LongSkip(Block(), Block(), Block()).eval(), images)
    assert [unit.name for unit in anatomy.units[1:-1]] == [
        f"blocks.{n}.{kind}" for n in range(3) for kind in ("msa", "mlp")
    ]


def test_two_runs_of_the_same_blocks_are_told_and_not_removed(images: Tensor) -> None:
    class TwoStreams(Net):
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images) + super().forward(images.flip(-1))

    anatomy = Anatomy.of(TwoStreams(Block()).eval(), images)
    assert kinds(anatomy) == ["stem", "msa", "mlp", "head"]
    assert not any(unit.removal for unit in anatomy.units)
    assert any("more than once" in note for note in anatomy.notes)


def test_a_fixed_transform_along_tokens_is_a_token_mlp(images: Tensor) -> None:
    class Fourier(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.fft.fft2(x).real

    assert kinds(Anatomy.of(Net(Block(Fourier())).eval(), images))[1:3] == ["token_mlp", "mlp"]


class Recurrence(nn.Module):
    """A gated recurrence along tokens, written as a loop."""

    def forward(self, x: Tensor) -> Tensor:
        state, states = torch.zeros_like(x[:, 0]), []
        for token in x.unbind(1):
            state = token.sigmoid() * state + token
            states.append(state)
        return torch.stack(states, 1)


class Graph(nn.Module):
    """The largest difference to the nearest tokens."""

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x, x).topk(4, largest=False).indices
        return (torch.stack([one[chosen] for one, chosen in zip(x, nearest, strict=True)]) - x[:, :, None]).amax(2)


class Deformable(nn.Module):
    """Features at points that each token chooses."""

    def forward(self, x: Tensor) -> Tensor:
        points = x[..., :2].tanh().unflatten(1, (4, 4))
        sampled = nn.functional.grid_sample(x.mT.unflatten(-1, (4, 4)), points, align_corners=False)
        return sampled.flatten(2).mT


class Involution(nn.Module):
    """Neighbours summed with weights that each token computes."""

    def forward(self, x: Tensor) -> Tensor:
        near = nn.functional.unfold(x.mT.unflatten(-1, (4, 4)), 3, padding=1).unflatten(1, (WIDTH, 9))
        return (near * x.mT[:, None, :9]).sum(2).mT


class Opposite(nn.Module):
    """The difference of each token and its mirror image."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.flip(1)


class RunningProduct(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sigmoid().cumprod(1)


@pytest.mark.parametrize(
    ("mixer", "kind"),
    [
        (Recurrence(), "token_mlp"),
        (Involution(), "token_mlp"),
        (Opposite(), "token_mlp"),
        (RunningProduct(), "token_mlp"),
        (Graph(), "msa"),
        (Deformable(), "msa"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else value,
)
def test_tokens_that_meet_without_a_layer_are_no_mlp(mixer: nn.Module, kind: str, images: Tensor) -> None:
    """A token that moves when another's patch changes was mixed with it: an independent look at the kind."""
    network = Net(Block(mixer)).eval()
    anatomy = Anatomy.of(network, images)
    assert kinds(anatomy) == ["stem", kind, "mlp", "head"]
    assert (kind == "msa") == any("no map can be recorded" in note for note in anatomy.notes)
    tokens = torch.randn(1, 16, WIDTH, generator=torch.Generator().manual_seed(0), requires_grad=True)
    (gradient,) = torch.autograd.grad(mixer(tokens)[0, 10].sum(), tokens)
    assert gradient[0].abs().sum(-1).count_nonzero() > 1


def test_a_gate_by_the_mean_of_all_tokens_leaves_an_mlp_an_mlp(images: Tensor) -> None:
    class Excited(Block):
        def forward(self, x: Tensor) -> Tensor:
            x = x + self.attn(self.norm1(x))
            y = self.mlp(self.norm2(x))
            return x + y * y.mean(1, keepdim=True).sigmoid()

    assert kinds(Anatomy.of(Net(Excited()).eval(), images)) == ["stem", "msa", "mlp", "head"]


def test_patches_cut_and_joined_by_shuffling_pixels_are_on_a_grid() -> None:
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))

    class Unshuffled(Net):
        def __init__(self) -> None:
            super().__init__(Block())
            self.patch = nn.Linear(192, WIDTH)

        def tokens(self, images: Tensor) -> Tensor:
            return self.patch(nn.functional.pixel_unshuffle(images, 8).flatten(2).mT)

    anatomy = Anatomy.of(Unshuffled().eval(), images)
    assert [unit.output.layout.size for unit in anatomy.units[:-1]] == [(4, 4)] * 3
    upsampled = nn.Sequential(
        *(nn.Conv2d(3, 16, 4, 4), nn.ReLU(), nn.PixelShuffle(2), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10)),
    )
    assert [unit.output.layout.size for unit in Anatomy.of(upsampled.eval(), images).units[:-1]] == [(8, 8), (16, 16)]


def test_additions_that_depend_on_the_batch_are_an_error(images: Tensor) -> None:
    class Uneven(Block):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) > 2:
                _ = x + x
            x = x + self.attn(self.norm1(x)) * 1.0
            return x + self.mlp(self.norm2(x)) * 1.0

    network = Net(Uneven()).eval()
    anatomy = Anatomy.of(network, images)
    sites = {"branch": anatomy.of_kind("msa")[0].branch}
    wrong = r"Uneven added 3 times in this pass and 2 times"
    with pytest.raises(AnatomyError, match=wrong), torch.no_grad(), taps(sites):
        network(images)


def test_a_token_made_from_the_image_is_off_the_grid(images: Tensor) -> None:
    class MeanToken(Net):
        def tokens(self, images: Tensor) -> Tensor:
            x = super().tokens(images)
            return torch.cat([x.mean(1, keepdim=True), x], 1)

    network = MeanToken(Block()).eval()
    (unit,) = Anatomy.of(network, images).of_kind("msa")
    assert unit.attention.keys.prefix == unit.output.layout.prefix == 1


class Tokens(Net):
    """A class token at any place among registers and patches; `read` is what the head takes."""

    def __init__(self, before: int, behind: int, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__(Block())
        self.before, self.behind = (nn.Parameter(torch.randn(1, count, WIDTH)) for count in (before, behind))
        self.read = read

    def tokens(self, images: Tensor) -> Tensor:
        x = super().tokens(images)
        added = [part.expand(len(x), -1, -1) for part in (self.before, self.behind)]
        return torch.cat((added[0], x, added[1]), 1)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.read(self.blocks[0](self.tokens(images))))


@pytest.mark.parametrize(
    ("before", "behind", "read", "place"),
    [
        (1, 0, lambda x: x[:, 0], 0),
        (0, 1, lambda x: x[:, -1], 16),
        (2, 1, lambda x: x[:, 1], 1),
        (0, 3, lambda x: x.split((16, 1, 2), 1)[1].squeeze(1), 16),
        (2, 0, lambda x: (x[:, 1] + x[:, 0]) / 2, 1),
        (2, 0, lambda x: torch.cat((x[:, 1], x[:, 2:].mean(1)), -1).unflatten(-1, (2, -1)).mean(1), 1),
        (3, 0, lambda x: x[:, 3:].mean(1), None),
        (1, 2, lambda x: x.mean(1), None),
    ],
    ids=["first", "last", "second", "split", "two", "with the mean", "registers", "mean of all"],
)
def test_the_class_token_is_the_one_that_the_head_reads(
    before: int, behind: int, read: Callable[[Tensor], Tensor], place: int | None, images: Tensor
) -> None:
    network = Tokens(before, behind, read).eval()
    anatomy = Anatomy.of(network, images)
    (unit,) = anatomy.of_kind("msa")
    assert unit.output.layout.prefix == before + behind
    assert unit.output.layout.has_class == unit.attention.keys.has_class == (place is not None)
    maps = []
    with torch.no_grad(), record_attention([unit], maps.append), taps({"state": unit.output}) as seen:
        network(images)
    assert maps[0].has_class == (place is not None)
    on_grid = slice(before, before + 16)
    applied = network.blocks[0].attn.applied
    torch.testing.assert_close(
        maps[0].weights[..., before + behind :],
        applied[..., [*_others(place, before, behind), *range(25)[on_grid]], on_grid],
    )
    if place is not None:
        torch.testing.assert_close(maps[0].weights[:, :, 0, 0], applied[:, :, place, place])
        with torch.no_grad():
            state = network.tokens(images) + network.blocks[0].attn(network.blocks[0].norm1(network.tokens(images)))
        torch.testing.assert_close(seen["state"][:, 0], state[:, place])


def _others(place: int | None, before: int, behind: int) -> list[int]:
    """Return the tokens off the grid in order, the class token first."""
    off = [*range(before), *range(before + 16, before + 16 + behind)]
    return off if place is None else [place, *(token for token in off if token != place)]
