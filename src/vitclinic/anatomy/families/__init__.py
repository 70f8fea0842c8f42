"""Families of networks: where the insides of timm, torchvision and Hugging Face are known."""

from vitclinic.anatomy.families.convnext import CONVNEXT
from vitclinic.anatomy.families.huggingface import HUGGINGFACE
from vitclinic.anatomy.families.mixer import MIXER
from vitclinic.anatomy.families.pit import PIT
from vitclinic.anatomy.families.preact_resnet import ALTERNET, PREACT_RESNET
from vitclinic.anatomy.families.registry import Family, known_families, recognise, register_family
from vitclinic.anatomy.families.resnet import RESNET, TORCHVISION_RESNET
from vitclinic.anatomy.families.swin import SWIN, SWIN_V2
from vitclinic.anatomy.families.torchvision import TORCHVISION
from vitclinic.anatomy.families.vit import VIT
from vitclinic.anatomy.families.volo import VOLO

for _family in (
    *(VIT, PIT, SWIN, SWIN_V2, MIXER, RESNET, CONVNEXT, VOLO),
    *(TORCHVISION_RESNET, *TORCHVISION),
    *HUGGINGFACE,
    *(PREACT_RESNET, ALTERNET),  # in this order: an AlterNet is also a PreActResNet, and the last is asked first
):
    register_family(_family)

__all__ = ["Family", "known_families", "recognise", "register_family"]
