"""The spatial states of networks of several kinds."""

import pytest
import torch
from torch import nn

from tests.anatomy.networks import NETWORKS, shaken, tiny_vit
from vitclinic.anatomy import Anatomy, taps
from vitclinic.anatomy.families import recognise
from vitclinic.probes import DoesNotApply
from vitclinic.probes.features.states import spatial_states


def test_a_vit_has_its_patches_as_states_and_neither_class_token_nor_logits():
    network = shaken(tiny_vit(reg_tokens=2)).eval()  # a grid of 4 x 6 behind three prefix tokens
    anatomy = Anatomy.of(network)
    states = spatial_states(anatomy)
    assert [state.unit for state in states] == list(anatomy.units[:-1])
    with torch.no_grad(), taps({state.unit.name: state.site for state in states}) as seen:
        network(torch.rand(2, 3, 32, 48))
    for state in states:
        tokens = seen[state.unit.name]
        patches = tokens if state.unit.name == "stem" else tokens[:, 3:]
        assert torch.equal(state.tokens(tokens), patches)
        assert torch.equal(state.maps(tokens)[1, :, 2, 3], patches[1, 2 * 6 + 3])


@pytest.mark.parametrize("name", ["timm volo_d1_224", "swin, not square, padded", "vitclinic alternet, cifar"])
def test_states_of_all_layouts_lie_on_their_grids(name):
    network = shaken(NETWORKS[name]()).eval()
    anatomy = Anatomy.of(network)
    states = spatial_states(anatomy)
    with torch.no_grad(), taps({state.unit.name: state.site for state in states}) as seen:
        core, family = recognise(network)
        core(torch.rand(2, *family.input_size(core)))
    sizes = [state.maps(seen[state.unit.name]).shape for state in states]
    assert all(len(size) == 4 and size[0] == 2 for size in sizes)
    areas = [height * width for _, _, height, width in sizes]
    assert areas == sorted(areas, reverse=True)
    off_grid = {unit.name for unit in anatomy.units} - {state.unit.name for state in states}
    assert off_grid == {"head"} | ({f"post_network.{i}.msa" for i in range(2)} if "volo" in name else set())


def test_a_network_without_a_grid_has_no_states():
    anatomy = Anatomy("nothing", nn.Identity(), (), {})
    with pytest.raises(DoesNotApply, match="feature maps as its output"):
        spatial_states(anatomy)
