"""AlterNet [park2022 Sec. 4.1, App. E]: a pre-activation ResNet whose stages end with alternating MSA blocks."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import groupby
from typing import Any, TypeVar, Unpack

from timm.models import generate_default_cfgs, register_model
from torch import nn

from vitclinic._core.errors import ModelError
from vitclinic.anatomy import Anatomy
from vitclinic.models.msa_block import Activation, MsaBlock, MsaOptions, PostActMsaBlock, build_msa_block
from vitclinic.models.preact_resnet import (
    PUBLISHED,
    PreActBasicBlock,
    PreActBottleneck,
    PreActResNet,
    Stem,
    build,
)

HEADS = (3, 6, 12, 24)
"""Heads per stage, as in Swin: "more heads and higher hidden dimensions in late stages"."""

_MSAS: dict[str, tuple[int, ...]] = {"imagenet": (0, 1, 3, 2), "cifar": (0, 1, 1, 2)}
_WINDOW = {"imagenet": 7, "cifar": 4}


def msa_pattern(blocks: int, msas: int) -> list[bool]:
    """Return which blocks of a stage are MSAs: from its end MSA, Conv, MSA, Conv ... until there are `msas`.

    The first block of a stage subsamples and stays a Conv [park2022 Sec. 4.1].

    Args:
        blocks: Number of blocks in the stage.
        msas: Number of MSA blocks among them.

    Returns:
        True for each MSA block, in order.

    Raises:
        ValueError: The stage has no room for that many.

    Example:
        >>> ["MSA" if msa else "Conv" for msa in msa_pattern(6, 2)]
        ['Conv', 'Conv', 'Conv', 'MSA', 'Conv', 'MSA']
    """
    if not 0 <= msas <= blocks // 2:
        raise ValueError(f"a stage of {blocks} blocks has room for 0 to {blocks // 2} MSAs, not for {msas}.")
    return [False] * (blocks - 2 * msas) + [False, True] * msas


class AlterNet(PreActResNet):
    """AlterNet: a pre-activation ResNet whose stages end in alternating Conv and MSA blocks [park2022 Sec. 4.1].

    `shared_bias=True` and `msa_act="gelu"` follow the authors' code, which differs from the text of the paper there.

    Args:
        block: The convolutional block.
        layers: Number of blocks in each of the four stages.
        stem: `imagenet` or `cifar`.
        msas: Number of MSA blocks per stage; by default the paper's, (0, 1, 3, 2) for the ImageNet stem and
            (0, 1, 1, 2) for CIFAR's, or fewer if a stage is too short.
        heads: Heads of the MSAs in each stage.
        head_width: Width of a head.
        window: Side of the attention windows; by default 7, or 4 with the CIFAR stem.
        shared_bias: Use one table of position biases for all heads.
        msa_act: Activation of the MSA blocks.
        **keywords: Those of `PreActResNet`.

    Raises:
        ValueError: `msas`, `heads` and `layers` do not match.

    Example:
        >>> import torch
        >>> network = AlterNet(PreActBasicBlock, (1, 1, 2, 2), stem="cifar", channels=(8, 8, 8, 8), num_classes=10)
        >>> network(torch.rand(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        block: type[PreActBasicBlock] | type[PreActBottleneck],
        layers: Sequence[int],
        *,
        stem: Stem = "imagenet",
        msas: Sequence[int] | None = None,
        heads: Sequence[int] = HEADS,
        head_width: int = 64,
        window: int | None = None,
        shared_bias: bool = False,
        msa_act: Activation = "relu",
        **keywords: Any,
    ) -> None:
        super().__init__(block, layers, stem=stem, **keywords)
        if msas is None:
            msas = [min(most, blocks // 2) for most, blocks in zip(_MSAS[stem], layers, strict=True)]
        if not len(msas) == len(heads) == len(layers):
            raise ValueError("msas and heads must have one number per stage, four each.")
        options: MsaOptions = {
            "head_width": head_width,
            "window": window or _WINDOW[stem],
            "shared_bias": shared_bias,
            "msa_act": msa_act,
        }
        for stage, pattern in enumerate(map(msa_pattern, layers, msas)):
            blocks = self.stage(stage)
            for index in (index for index, is_msa in enumerate(pattern) if is_msa):
                blocks[index] = build_msa_block(blocks[index], MsaBlock, heads[stage], **options)


default_cfgs = generate_default_cfgs({f"alternet{depth}.untrained": PUBLISHED for depth in (18, 34, 50, 101)})


@register_model  # type: ignore[untyped-decorator]
def alternet18(pretrained: bool = False, **keywords: Any) -> PreActResNet:
    """Build Alter-ResNet-18; its last stage already has an even number of blocks."""
    keywords = {"block": PreActBasicBlock, "layers": (2, 2, 2, 2), **keywords}
    return build("alternet18", AlterNet, pretrained, **keywords)


@register_model  # type: ignore[untyped-decorator]
def alternet34(pretrained: bool = False, **keywords: Any) -> PreActResNet:
    """Build Alter-ResNet-34: ResNet-34 with one more block in the last stage."""
    keywords = {"block": PreActBasicBlock, "layers": (3, 4, 6, 4), **keywords}
    return build("alternet34", AlterNet, pretrained, **keywords)


@register_model  # type: ignore[untyped-decorator]
def alternet50(pretrained: bool = False, **keywords: Any) -> PreActResNet:
    """Build Alter-ResNet-50: ResNet-50 with one more block in the last stage."""
    keywords = {"block": PreActBottleneck, "layers": (3, 4, 6, 4), **keywords}
    return build("alternet50", AlterNet, pretrained, **keywords)


@register_model  # type: ignore[untyped-decorator]
def alternet101(pretrained: bool = False, **keywords: Any) -> PreActResNet:
    """Build Alter-ResNet-101: ResNet-101 with one more block in the last stage."""
    keywords = {"block": PreActBottleneck, "layers": (3, 4, 23, 4), **keywords}
    return build("alternet101", AlterNet, pretrained, **keywords)


_ARRANGEMENTS: dict[str, type[MsaBlock] | type[PostActMsaBlock]] = {
    "vitclinic pre-activation ResNet": MsaBlock,
    "vitclinic AlterNet": MsaBlock,
    "timm ResNet": PostActMsaBlock,
    "torchvision ResNet": PostActMsaBlock,
}
"""Families whose conv blocks can become MSA blocks, and the MSA block with the same layer order."""

Network = TypeVar("Network", bound=nn.Module)


class BuildUp:
    """The build-up rule: which Conv block of a ResNet to replace by an MSA block next [park2022 Sec. 4.1].

    The first proposal is the last block of the last stage. Train the network that `apply_to` returns, then decide:
    `accept()` keeps the MSA and proposes the block two positions earlier in the same stage ("alternately replace Conv
    blocks with MSA blocks from the end"); `reject()` keeps the Conv and proposes the end of the previous stage. The
    first block of a stage subsamples and is never proposed. After the first stage, `proposal` is None. MSAs in late
    stages have more heads, and so a larger hidden width (heads x head_width).

    It works on timm's and torchvision's ResNet and ResNeXt and on pre-activation ResNets, with or without a wrapper.
    Its state is plain data: `state_dict()`, `load_state_dict()`.

    Args:
        network: The network to start from; it is not changed.
        heads: Heads of the MSAs in each stage.
        **options: `head_width`, `window`, `shared_bias` and `msa_act` of the MSA blocks.

    Raises:
        ModelError: The network is not a ResNet, or `heads` does not match its stages.

    Example:
        >>> import timm
        >>> def score(network):  # train it, return its accuracy; here MSAs are good in the last stage only
        ...     return sum(isinstance(module, PostActMsaBlock) for module in network.layer4)
        >>> network = timm.create_model("resnet18", layers=(2, 2, 2, 4))
        >>> rule, best = BuildUp(network, window=4), score(network)
        >>> while rule.proposal is not None:
        ...     candidate = rule.apply_to(network)
        ...     accuracy = score(candidate)
        ...     if accuracy > best:
        ...         best = accuracy
        ...         rule.accept()
        ...     else:
        ...         rule.reject()
        >>> rule.accepted
        ['layer4.3', 'layer4.1']
        >>> network = rule.apply_to(network)
    """

    def __init__(self, network: nn.Module, heads: Sequence[int] = HEADS, **options: Unpack[MsaOptions]) -> None:
        self._stages = _stages(network)
        if len(heads) != len(self._stages):
            raise ModelError(f"The network has {len(self._stages)} stages; give the heads of each (got {list(heads)}).")
        self._heads = tuple(heads)
        self._options = options
        self.accepted: list[str] = []
        self.proposal: str | None = None
        self._propose(len(self._stages) - 1)

    def accept(self) -> None:
        """Keep the proposed MSA block and continue in its stage."""
        proposal = self._pending()
        self.accepted.append(proposal)
        stage, index = self._place(proposal)
        if index - 2 >= 1:
            self.proposal = self._stages[stage][index - 2]
        else:
            self._propose(stage - 1)

    def reject(self) -> None:
        """Keep the Conv and continue in the previous stage."""
        self._propose(self._place(self._pending())[0] - 1)

    def apply_to(self, network: Network) -> Network:
        """Return a copy of `network` in which the accepted blocks and the proposed one are MSA blocks.

        Existing MSA blocks keep their weights, as do all other blocks.
        """
        names = [*self.accepted, *([] if self.proposal is None else [self.proposal])]
        heads = {name: self._heads[self._place(name)[0]] for name in names}
        return _insert_msas(copy.deepcopy(network), heads, self._options)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the rule as plain data."""
        return {"accepted": list(self.accepted), "proposal": self.proposal}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a rule for a network with the same blocks."""
        names = [*state["accepted"], *([] if state["proposal"] is None else [state["proposal"]])]
        known = {name for stage in self._stages for name in stage[1:]}
        if unknown := [name for name in names if name not in known]:
            raise ModelError(
                f"The rule's state belongs to another network: this one has no block {unknown[0]} to replace."
            )
        self.accepted, self.proposal = list(state["accepted"]), state["proposal"]

    def _propose(self, stage: int) -> None:
        """Propose the end of `stage`, or of the nearest earlier stage that has a block to replace."""
        ends = [blocks[-1] for blocks in self._stages[: stage + 1] if len(blocks) > 1]
        self.proposal = ends[-1] if ends else None

    def _pending(self) -> str:
        if self.proposal is None:
            raise ModelError("The build-up rule is finished; there is no proposal to accept or reject.")
        return self.proposal

    def _place(self, name: str) -> tuple[int, int]:
        return next((stage, blocks.index(name)) for stage, blocks in enumerate(self._stages) if name in blocks)


def alternate(
    network: Network, msas: Sequence[int], heads: Sequence[int] = HEADS, **options: Unpack[MsaOptions]
) -> Network:
    """Return a copy of a ResNet with AlterNet's pattern of MSA blocks [park2022 App. E].

    Args:
        network: A ResNet or ResNeXt of timm or torchvision, or a pre-activation ResNet.
        msas: Number of MSA blocks in each stage.
        heads: Heads of the MSAs in each stage.
        **options: `head_width`, `window`, `shared_bias` and `msa_act` of the MSA blocks.

    Raises:
        ModelError: The network is not a ResNet, or the pattern does not fit it.

    Example:
        >>> import timm
        >>> network = alternate(timm.create_model("resnext50_32x4d", layers=(3, 4, 6, 4)), msas=(0, 1, 3, 2))
        >>> [type(block).__name__ for block in network.layer4]
        ['Bottleneck', 'PostActMsaBlock', 'Bottleneck', 'PostActMsaBlock']
    """
    stages = _stages(network)
    if not len(msas) == len(heads) == len(stages):
        raise ModelError(f"The network has {len(stages)} stages; give msas and heads for each of them.")
    chosen: dict[str, int] = {}
    for blocks, count, of_stage in zip(stages, msas, heads, strict=True):
        try:
            pattern = msa_pattern(len(blocks), count)
        except ValueError as error:
            raise ModelError(f"This pattern does not fit: {error}") from error
        chosen |= {name: of_stage for name, is_msa in zip(blocks, pattern, strict=True) if is_msa}
    return _insert_msas(copy.deepcopy(network), chosen, options)


def _stages(network: nn.Module) -> list[list[str]]:
    """Return the names of the blocks in each stage of a ResNet."""
    anatomy = Anatomy.of(network)
    _arrangement(anatomy)
    return [[block.name for block in blocks] for _, blocks in groupby(anatomy.blocks, lambda block: block.stage)]


def _insert_msas(network: Network, heads: dict[str, int], options: MsaOptions) -> Network:
    """Replace the Conv blocks named in `heads`, in place, by MSA blocks with that many heads."""
    anatomy = Anatomy.of(network)
    for block in anatomy.blocks:
        if block.name in heads and block.unit("msa") is None:
            replaced = anatomy.network.get_submodule(block.name)
            msa = build_msa_block(replaced, _arrangement(anatomy), heads[block.name], **options)
            anatomy.network.set_submodule(block.name, msa)
    return network


def _arrangement(anatomy: Anatomy) -> type[MsaBlock] | type[PostActMsaBlock]:
    if anatomy.family not in _ARRANGEMENTS:
        raise ModelError(
            f"The build-up rule does not fit a {anatomy.family}; it fits {', '.join(sorted(_ARRANGEMENTS))}."
        )
    return _ARRANGEMENTS[anatomy.family]
