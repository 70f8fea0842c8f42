"""A zoo of small networks with random weights: every module of timm, families of Hugging Face, torchvision, and ours.

>>> from tests.anatomy.zoo import ZOO
>>> entry = ZOO["timm/vit_tiny_patch16_224"]
>>> entry.build()(entry.images()).shape
torch.Size([2, 10])
"""

from __future__ import annotations

from torch import nn

from tests.anatomy import handwritten as hw
from tests.anatomy import handwritten_convnets as cnn
from tests.anatomy.zoo.entry import Entry
from tests.anatomy.zoo.huggingface import HUGGING_FACE
from tests.anatomy.zoo.timm_models import TIMM
from tests.anatomy.zoo.torchvision_models import TORCHVISION

_IMAGE = (3, hw.SIZE, hw.SIZE)

_VITS = {
    "linear_patch_vit": (hw.LinearPatchViT, "patches by reshaping, norms inside the branches"),
    "dict_vit": (hw.DictViT, "returns a dict, features first"),
    "tuple_vit": (hw.TupleViT, "returns logits and features"),
    "named_tuple_vit": (hw.NamedTupleViT, "returns a named tuple"),
    "dataclass_vit": (hw.DataclassViT, "returns a dataclass, features first"),
    "encoder_vit": (hw.EncoderViT, "nn.TransformerEncoder, batch first"),
    "encoder_vit_sequence_first": (lambda: hw.EncoderViT(batch_first=False), "nn.TransformerEncoder, [N, B, C]"),
    "encoder_vit_post_norm": (lambda: hw.EncoderViT(norm_first=False), "nn.TransformerEncoder, norms behind the sums"),
    "normalize_then_vit": (lambda: nn.Sequential(hw.Normalize(), hw.timm_vit()), "Sequential of two"),
    "backbone_with_head": (hw.BackboneWithHead, "timm's ViT without head, and a Linear"),
    "functional_vit": (hw.FunctionalViT, "no modules"),
    "shared_block_vit": (hw.SharedBlockViT, "one block called three times"),
    "sequence_first_vit": (hw.SequenceFirstViT, "[N, B, C]"),
    "parallel_vit": (lambda: hw.BlockViT(hw.ParallelBlock), "attention and MLP in parallel"),
    "gated_vit": (lambda: hw.BlockViT(hw.GatedBlock), "x + sigmoid(g) * f(x)"),
    "flip_averaged_vit": (lambda: hw.FlipAveraged(hw.LinearPatchViT()), "runs its network twice an image"),
}
_OTHERS = {
    "conv1d_mixer": (hw.ConvMixerMLP, "tokens mixed by Conv1d"),
    "plain_cnn": (cnn.plain_cnn, "Sequential without residuals"),
    "tutorial_cnn": (cnn.TutorialCNN, "functional ReLU, no residuals"),
    "inline_resnet": (cnn.InlineResNet, "out += identity, F.relu"),
    "unet_classifier": (cnn.UNetClassifier, "concatenated skips"),
    "dense_cnn": (cnn.DenseCNN, "dense connections"),
}
HAND_WRITTEN: dict[str, Entry] = {
    name: Entry(construct, _IMAGE, "hand-written", attention, notes)
    for table, attention in ((_VITS, True), (_OTHERS, False))
    for name, (construct, notes) in table.items()
}

ZOO: dict[str, Entry] = {
    f"{library}/{name}": entry
    for library, entries in {
        "timm": TIMM,
        "transformers": HUGGING_FACE,
        "torchvision": TORCHVISION,
        "hand-written": HAND_WRITTEN,
    }.items()
    for name, entry in entries.items()
}
