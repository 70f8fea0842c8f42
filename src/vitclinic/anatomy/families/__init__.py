"""Families of networks: the structure of the networks of timm, torchvision and Hugging Face."""

from dataclasses import replace

from vitclinic.anatomy.families.convnets import ALTERNET, CONVNEXT, PREACT_RESNET, RESNET, TORCHVISION_RESNET
from vitclinic.anatomy.families.family import Family, list_families, recognise, register_family
from vitclinic.anatomy.families.huggingface import HUGGINGFACE
from vitclinic.anatomy.families.timm_transformers import MIXER, PIT, SWIN, SWIN_V2, VIT, VOLO
from vitclinic.anatomy.families.torchvision import TORCHVISION

for _family in (
    *(VIT, PIT, SWIN, SWIN_V2, MIXER, RESNET, CONVNEXT, VOLO),
    *(TORCHVISION_RESNET, *TORCHVISION),
    *HUGGINGFACE,
    *(PREACT_RESNET, ALTERNET),  # in this order: an AlterNet is also a PreActResNet, and the last is asked first
):
    register_family(replace(_family, built_in=True))

__all__ = ["Family", "list_families", "recognise", "register_family"]
