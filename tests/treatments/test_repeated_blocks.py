"""Treatments of networks that run a block several times, or all of themselves again, or do all in one forward."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import Tensor, nn

from tests.anatomy.test_strange_modules import WIDTH, Attention, Block, Net
from vitclinic import treat
from vitclinic._core.errors import TreatmentError
from vitclinic.data import ImageSpec
from vitclinic.treatments.context_broadcasting import broadcast_context

SPEC = ImageSpec(5, 3, (32, 32))


class Shared(Net):
    """One block, run four times."""

    def forward(self, images: Tensor) -> Tensor:
        x = self.tokens(images)
        for _ in range(4):
            x = self.blocks[0](x)
        return self.head(x.mean(1))


class Again(Net):
    """All blocks, run for the image and for its mirror image; `inline` does their work in this forward."""

    inline = False

    def run(self, images: Tensor) -> Tensor:
        x = self.tokens(images)
        for block in self.blocks:
            if self.inline:
                x = x + block.attn(block.norm1(x)) * 0.5
                x = x + block.mlp(block.norm2(x)) * 0.5
            else:
                x = block(x)
        return self.head(x.mean(1))

    def forward(self, images: Tensor) -> Tensor:
        return self.run(images) + self.run(images.flip(-1))


class InlineAgain(Again):
    inline = True


class Inline(Net):
    """A class token, a position embedding and the blocks' work in one forward."""

    def __init__(self, *blocks: nn.Module, cls_token: bool = True) -> None:
        super().__init__(*blocks)
        self.cls = nn.Parameter(torch.randn(1, int(cls_token), WIDTH))
        self.pos = nn.Parameter(torch.randn(1, 16 + int(cls_token), WIDTH))

    def forward(self, images: Tensor) -> Tensor:
        x = torch.cat((self.cls.expand(len(images), -1, -1), self.tokens(images)), 1) + self.pos
        for block in self.blocks:
            x = x + block.attn(block.norm1(x))
            x = x + block.mlp(block.norm2(x))
        return self.head(x[:, 0])


@pytest.fixture
def images() -> Tensor:
    return torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def run_block(block: Block, x: Tensor, context: bool) -> Tensor:
    """A pre-norm block, with the mean of all tokens at the end of its MLP."""
    x = x + block.attn(block.norm1(x))
    y = block.mlp(block.norm2(x))
    return x + (broadcast_context(y) if context else y)


def test_context_in_the_upper_half_of_a_shared_block_is_in_its_later_runs(images: Tensor) -> None:
    torch.manual_seed(0)
    network = Shared(Block()).eval()
    with torch.no_grad():
        state = network.tokens(images)
        for number in range(4):
            state = run_block(network.blocks[0], state, context=number >= 2)
        expected = network.head(state.mean(1))
        treated = treat(network, "context_broadcasting", spec=SPEC)
        torch.testing.assert_close(treated(images), expected)
        torch.testing.assert_close(treated(images), expected)  # runs are counted anew in each pass
        torch.testing.assert_close(copy.deepcopy(treated)(images), expected)


def test_a_shared_block_has_one_scale_if_all_of_its_runs_have(images: Tensor) -> None:
    treated = treat(Shared(Block()), {"context_broadcasting": {"scaled": True}}, spec=SPEC)
    assert [name for name, _ in treated.named_parameters() if name.endswith("scale")] == [
        "blocks.0.mlp.2.context_broadcasting.scale"
    ]


def test_some_runs_of_a_layer_inside_the_mlp_are_refused(images: Tensor) -> None:
    network = Shared(Block())
    wrong = "blocks.0#3.mlp shares its layers with other units, and 'layers' leaves some of them out; use layers: all"
    with pytest.raises(TreatmentError, match=re.escape(wrong)):
        treat(network, {"context_broadcasting": {"position": "mlp_mid"}}, spec=SPEC)


@pytest.mark.parametrize("kind", [Again, InlineAgain])
def test_context_in_a_network_that_runs_again_is_in_both_runs(kind: type[Again], images: Tensor) -> None:
    torch.manual_seed(0)
    network = kind(Block(), Block()).eval()
    scale = 0.5 if network.inline else 1.0
    with torch.no_grad():
        expected = torch.zeros(4, 5)
        for view in (images, images.flip(-1)):
            x = network.tokens(view)
            for number, block in enumerate(network.blocks):
                x = x + block.attn(block.norm1(x)) * scale
                y = block.mlp(block.norm2(x)) * scale
                x = x + (broadcast_context(y) if number == 1 else y)
            expected += network.head(x.mean(1))
        treated = treat(network, "context_broadcasting", spec=SPEC)
        torch.testing.assert_close(treated(images), expected)


@pytest.mark.parametrize("treatment", ["registers", "extra_block"])
def test_what_would_treat_one_of_two_runs_is_refused(treatment: str, images: Tensor) -> None:
    with pytest.raises(TreatmentError, match="it runs its blocks more than once for each image"):
        treat(InlineAgain(Block(), Block()), treatment, spec=SPEC)


@pytest.mark.parametrize("cls_token", [True, False])
def test_registers_where_the_forward_adds_positions_by_itself(cls_token: bool, images: Tensor) -> None:
    torch.manual_seed(0)
    network = Inline(Block(), Block(), cls_token=cls_token).eval()
    treated = treat(copy.deepcopy(network), {"registers": {"count": 3}}, spec=SPEC)
    prefix = int(cls_token)
    with torch.no_grad():
        x = torch.cat((network.cls.expand(4, -1, -1), network.tokens(images)), 1) + network.pos
        registers = treated.registers.reg_token.expand(4, -1, -1)
        x = torch.cat((x[:, :prefix], registers, x[:, prefix:]), 1)
        for block in network.blocks:
            x = run_block(block, x, context=False)
        x = torch.cat((x[:, :prefix], x[:, prefix + 3 :]), 1)
        torch.testing.assert_close(treated(images), network.head(x[:, 0]))


def test_a_part_between_modules_is_at_its_place_in_training_too(images: Tensor) -> None:
    """BatchNorm counts its batches in training, by an addition that is none of the network's."""

    class Normed(Inline):
        def __init__(self) -> None:
            super().__init__(Block(Attention()), Block(Attention()))
            self.bn = nn.BatchNorm1d(WIDTH)

        def forward(self, images: Tensor) -> Tensor:
            x = self.bn(self.tokens(images).mT).mT + self.pos[:, 1:]
            for block in self.blocks:
                x = x + 0.5 * block.attn(block.norm1(x))
                x = x + 0.5 * block.mlp(block.norm2(x))
            return self.head(x.mean(1))

    torch.manual_seed(0)
    network = Normed()
    for treatment in ("context_broadcasting", "extra_block", "registers"):
        treated = treat(copy.deepcopy(network), treatment, spec=SPEC).train()
        loss = treated(images).square().sum()
        loss.backward()
        added = {name: p for name, p in treated.named_parameters() if name not in dict(network.named_parameters())}
        assert all(p.grad is not None and p.grad.isfinite().all() for p in added.values())


def test_context_at_the_end_of_an_mlp_that_is_scaled_together_with_the_attention(images: Tensor) -> None:
    class Scaled(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + 0.3 * (self.attn(self.norm1(x)) + self.mlp(self.norm2(x)))

    torch.manual_seed(0)
    network = Net(Scaled(), Scaled()).eval()
    with torch.no_grad():
        x = network.blocks[0](network.tokens(images))
        block = network.blocks[1]
        x = x + 0.3 * (block.attn(block.norm1(x)) + broadcast_context(block.mlp(block.norm2(x))))
        expected = network.head(x.mean(1))
        torch.testing.assert_close(treat(network, "context_broadcasting", spec=SPEC)(images), expected)
