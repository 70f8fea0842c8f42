"""The states of a network as a notebook collects them: in float64, block by block or by taps, all of them kept."""

import math

import numpy as np
import torch
from scipy.interpolate import RegularGridInterpolator

from vitclinic.anatomy import Anatomy, taps


def half_diagonal(maps):
    """Log amplitudes [B, F] of feature maps [B, C, H, W] by the full spectrum, from its centre to its corner."""
    height, width = maps.shape[2:]
    spectrum = np.fft.fftshift(np.abs(np.fft.fft2(maps)), axes=(2, 3))
    log = np.log(np.maximum(spectrum, 1e-6)).mean(axis=1)
    wrapped = np.pad(log, ((0, 0), (1, 1), (1, 1)), mode="wrap")
    axes = [2 * (np.arange(-1, side + 1) - side // 2) / side for side in (height, width)]  # in units of pi
    longer = max(height, width)
    frequencies = np.array([2 * k / longer for k in range(longer) if 2 * k < longer] + [1.0])
    points = np.stack([frequencies, frequencies], axis=1)
    points = np.where(np.array([height, width]) == 1, 0.0, points)
    return frequencies, np.stack([RegularGridInterpolator(axes, image)(points) for image in wrapped])


def delta_log_amplitude(maps):
    """Delta log amplitude at pi of each image."""
    _, curve = half_diagonal(maps)
    return curve[:, -1] - curve[:, 0]


def variance(maps):
    """The variance over positions of each image, averaged over its channels."""
    return maps.reshape(*maps.shape[:2], -1).var(axis=2, ddof=1).mean(axis=1)


def states(patient):
    """Feature maps before and after each unit for all images, {name: {"input": maps, "output": maps}}."""
    network = patient.network.double().eval()
    images = torch.cat([batch.images for batch in patient.batches()]).double()
    anatomy = Anatomy.of(network, images)
    sites = {
        (unit.name, end): getattr(unit, end)
        for unit in anatomy.units
        for end in ("input", "output")
        if getattr(unit, end).layout.spatial
    }
    with torch.no_grad(), taps(sites) as seen:
        network(images)
    maps = {key: anatomy.grid(site, seen[key]).numpy() for key, site in sites.items()}
    return {
        unit.name: {end: maps[unit.name, end] for end in ("input", "output") if (unit.name, end) in maps}
        for unit in anatomy.units
    }


@torch.no_grad()
def vit_states(network, images):
    """The states of timm's ViT with one class token, taken apart by hand: {unit's name: maps}."""
    stem = network.patch_embed(images)
    x = torch.cat((network.cls_token.expand(len(images), -1, -1), stem), dim=1) + network.pos_embed
    tokens = {"stem": stem, "position": x[:, 1:]}
    for index, block in enumerate(network.blocks):
        x = x + block.attn(block.norm1(x))
        tokens[f"blocks.{index}.msa"] = x[:, 1:]
        x = x + block.mlp(block.norm2(x))
        tokens[f"blocks.{index}.mlp"] = x[:, 1:]
    return {name: _square(each).numpy() for name, each in tokens.items()}


def _square(tokens):
    side = math.isqrt(tokens.shape[1])
    return tokens.transpose(1, 2).unflatten(2, (side, side))


@torch.no_grad()
def resnet_states(network, images):
    """The states of timm's ResNet: {unit's name: maps}."""
    x = network.maxpool(network.act1(network.bn1(network.conv1(images))))
    maps = {"stem": x.numpy().copy()}
    for stage in (1, 2, 3, 4):
        for index, block in enumerate(getattr(network, f"layer{stage}")):
            x = block(x)
            maps[f"layer{stage}.{index}.conv"] = x.numpy().copy()
    return maps
