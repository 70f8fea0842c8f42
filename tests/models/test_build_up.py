"""The build-up rule: its sequence of proposals, and what it does to a network."""

import copy
import json

import pytest
import timm
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st

from vitclinic._core.errors import ModelError
from vitclinic.anatomy import Anatomy
from vitclinic.models import BuildUp, Normalized, alternate, create_model
from vitclinic.models.msa_block import MsaBlock, PostActMsaBlock

OPTIONS = {"heads": (1, 2, 2, 4), "head_width": 4, "window": 3}
SMALL = {"layers": (2, 2, 3, 4), "channels": (8, 8, 8, 16), "num_classes": 5}


def resnext():
    return timm.create_model("resnext50_32x4d", **SMALL, cardinality=2, base_width=32, drop_path_rate=0.2)


NETWORKS = {
    "preact bottleneck": (lambda: timm.create_model("preact_resnet50", **SMALL, drop_path_rate=0.2), MsaBlock),
    "preact basic": (lambda: timm.create_model("preact_resnet18", **SMALL), MsaBlock),
    "normalised": (lambda: create_model("preact_resnet18", **SMALL), MsaBlock),
    "timm bottleneck": (lambda: timm.create_model("resnet50", **SMALL), PostActMsaBlock),
    "timm basic": (lambda: timm.create_model("resnet18", **SMALL), PostActMsaBlock),
    "timm resnext": (resnext, PostActMsaBlock),
    "torchvision": (
        lambda: torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [1, 1, 1, 4], num_classes=5),
        PostActMsaBlock,
    ),
}


def rule_of(name="timm basic"):
    return BuildUp(NETWORKS[name][0](), **OPTIONS)


def proposals(rule, answers):
    """All that the rule proposes, given whether each proposal improved the network."""
    seen = []
    for improved in answers:
        if rule.proposal is None:
            break
        seen.append(rule.proposal)
        (rule.accept if improved else rule.reject)()
    return seen


def core(network):
    return network.backbone if isinstance(network, Normalized) else network


def test_all_improve_alternates_through_every_stage():
    rule = rule_of()
    assert proposals(rule, [True] * 20) == ["layer4.3", "layer4.1", "layer3.2", "layer2.1", "layer1.1"]
    assert rule.proposal is None


def test_none_improves_tries_the_end_of_every_stage_once():
    rule = rule_of()
    assert proposals(rule, [False] * 20) == ["layer4.3", "layer3.2", "layer2.1", "layer1.1"]
    assert rule.accepted == []


def test_a_rejection_goes_to_the_stage_before():
    assert proposals(rule_of(), [True, False, True, False, False]) == [
        *("layer4.3", "layer4.1", "layer3.2", "layer2.1", "layer1.1")
    ]
    rule = rule_of()
    assert proposals(rule, [False, True, True, True]) == ["layer4.3", "layer3.2", "layer2.1", "layer1.1"]
    assert rule.accepted == ["layer3.2", "layer2.1", "layer1.1"]


def test_the_paper_s_alternet_for_cifar_comes_out_of_its_findings():
    """Fig. 12a: MSAs in c4 help, one in c3 does and two do not, and the one at the end of c2 does."""
    baseline = timm.create_model("preact_resnet50", layers=(3, 4, 6, 4), channels=(8, 8, 8, 8), stem="cifar")
    rule = BuildUp(baseline, window=4)
    helps = {"layer4.3", "layer4.1", "layer3.5", "layer2.3"}
    while rule.proposal is not None:
        (rule.accept if rule.proposal in helps else rule.reject)()
    found = rule.apply_to(baseline)
    published = timm.create_model("alternet50", channels=(8, 8, 8, 8), stem="cifar")
    assert str(found).partition("\n")[2] == str(published).partition("\n")[2]
    found.load_state_dict(published.state_dict())


def test_stages_of_one_block_are_passed_over():
    network = timm.create_model("resnet18", layers=(2, 1, 1, 2), channels=(8, 8, 8, 8))
    assert proposals(BuildUp(network), [True] * 5) == ["layer4.1", "layer1.1"]


RULE = rule_of()


@settings(max_examples=40, deadline=None)
@given(answers=st.lists(st.booleans(), min_size=5, max_size=5), stop=st.integers(0, 4))
def test_a_saved_rule_goes_on_as_if_never_stopped(answers, stop):
    whole, resumed = copy.deepcopy(RULE), copy.deepcopy(RULE)
    first = proposals(whole, answers[:stop])
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    second = proposals(resumed, answers[stop:])
    assert second == proposals(whole, answers[stop:])
    assert resumed.accepted == whole.accepted
    assert len(set(first + second)) == len(first + second), "no block is proposed twice"


@pytest.mark.parametrize("name", NETWORKS)
def test_a_proposal_changes_its_block_only(name):
    torch.manual_seed(0)
    build, kind = NETWORKS[name]
    network = build().eval()
    before = {key: value.clone() for key, value in network.state_dict().items()}
    rule = BuildUp(network, **OPTIONS)
    rule.accept()
    candidate = rule.apply_to(network)
    assert network.state_dict().keys() == before.keys(), "the network itself is as it was"
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())
    blocks = {"layer4.3", "layer4.1"}
    replaced = {key for key, module in core(candidate).named_modules() if isinstance(module, kind)}
    assert replaced == blocks
    inside = tuple(f"{'backbone.' if isinstance(network, Normalized) else ''}{block}." for block in blocks)
    kept = {key: value for key, value in before.items() if not key.startswith(inside)}
    after = {key: value for key, value in candidate.state_dict().items() if not key.startswith(inside)}
    assert kept.keys() == after.keys()
    assert all(torch.equal(value, after[key]) for key, value in kept.items())

    old, new = (core(net).get_submodule("layer4.3") for net in (network, candidate))
    assert new.conv.in_channels == new.attn.proj.out_features == old.conv1.in_channels
    assert new.conv.out_channels == old.conv1.in_channels // old.expansion
    assert new.attn.heads == 4
    rate = getattr(getattr(old, "drop_path", None), "drop_prob", 0.0)
    assert getattr(new.drop_path, "drop_prob", 0.0) == pytest.approx(rate)
    assert not new.training

    x = torch.randn(2, 3, 48, 48)
    candidate.train()
    candidate(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in candidate.parameters())
    again = rule.apply_to(build())
    again.load_state_dict(candidate.state_dict())
    with torch.no_grad():
        assert torch.equal(again.eval()(x), candidate.eval()(x))
    kinds = [unit.kind for unit in Anatomy.of(candidate).units if unit.stage == 3]
    assert kinds == ["conv", "msa", "conv", "msa", "head"]


def test_accepted_blocks_keep_what_they_learned_and_rejected_ones_are_convs_again():
    network = NETWORKS["timm basic"][0]()
    rule = BuildUp(network, **OPTIONS)
    learned = rule.apply_to(network)
    rule.accept()
    further = rule.apply_to(learned)
    assert torch.equal(further.layer4[3].conv.weight, learned.layer4[3].conv.weight)
    assert isinstance(further.layer4[1], PostActMsaBlock)
    rule.reject()
    assert rule.proposal == "layer3.2"
    assert not isinstance(rule.apply_to(learned).layer4[1], PostActMsaBlock)


def test_the_pattern_on_a_post_activation_resnext():
    network = alternate(resnext(), msas=(1, 0, 1, 2), **OPTIONS)
    stages = [getattr(network, f"layer{stage}") for stage in range(1, 5)]
    letters = ["".join("M" if isinstance(block, PostActMsaBlock) else "C" for block in stage) for stage in stages]
    assert letters == ["CM", "CC", "CCM", "CMCM"]
    state = network.eval().layer4(torch.randn(1, 32, 4, 4))
    assert state.min() >= 0, "the state behind a post-activation block"


def test_sentences():
    with pytest.raises(ModelError, match=r"does not fit a timm ViT; it fits timm ResNet, .*\.$"):
        BuildUp(timm.create_model("vit_tiny_patch16_224", depth=1))
    network = NETWORKS["timm basic"][0]()
    with pytest.raises(ModelError, match="4 stages; give the heads of each"):
        BuildUp(network, heads=(1, 2))
    with pytest.raises(ModelError, match="4 stages; give msas and heads"):
        alternate(network, msas=(1, 1))
    with pytest.raises(ModelError, match="room for 0 to 1 MSAs, not for 2"):
        alternate(network, msas=(0, 2, 0, 0))
    rule = BuildUp(network, **OPTIONS)
    with pytest.raises(ModelError, match=r"no block layer9\.1"):
        rule.load_state_dict({"accepted": [], "proposal": "layer9.1"})
    proposals(rule, [False] * 9)
    for act in (rule.accept, rule.reject):
        with pytest.raises(ModelError, match="rule is finished"):
            act()
