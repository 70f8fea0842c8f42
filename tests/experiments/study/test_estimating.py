"""What a study would cost, against steps that are really made."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vitclinic._core.distributed import join_processes
from vitclinic._core.errors import ModelError, RecipeError
from vitclinic.data import DataConfig, ImageSpec, open_data
from vitclinic.experiments.study.catalogue import data_facts
from vitclinic.experiments.study.conduct import study
from vitclinic.experiments.study.costs import TWO_CORES, forward_flops, plan_study
from vitclinic.training import build_recipe
from vitclinic.training.network import create_network
from vitclinic.training.trainer import Trainer

from .networks import tiny_study

SAYS = {"says": "s", "measure": "accuracy", "greater": ["arm", 0]}
STEPS = 4
# Of some width, so that the matrices are the cost and not what is around them.
BASE = {
    "model": {"name": "vit_tiny_fitted", "patch_size": 2, "embed_dim": 48, "depth": 4, "num_heads": 2},
    "data": {"source": "digits", "limit": 40, "augment": "none"},
    "batch_size": 10,
    "epochs": 1,
    "workers": 0,
}


def plan_of(arm, **base):
    asked = tiny_study(base={**BASE, **base}, arms={"arm": arm}, expectations=[SAYS], seeds=3)
    return plan_study(asked), asked.recipes()["arm"]


def flops_of_training(recipe):
    """Of four steps that are really made."""
    dataset = open_data(recipe.data)
    device = torch.device("cpu")
    with join_processes(device) as distributed, sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        trainer = Trainer(recipe, dataset, STEPS, distributed, device)
        for _ in range(STEPS):
            trainer.advance()
        trainer.close()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "treatments",
    [[], ["sam"], [{"sam": {"every": 2}}], [{"sam": {"rho": 0.0}}], ["adversarial"], ["sam", "adversarial"]],
    ids=str,
)
def test_flops_are_those_of_the_steps_that_treatments_make(treatments):
    plan, recipe = plan_of({"treatments": treatments})
    (cost,) = plan.arms
    assert (cost.steps, cost.images) == (STEPS, 40)
    # The first layer needs no gradient of its input, which the estimate leaves aside.
    assert flops_of_training(recipe) == pytest.approx(cost.flops, rel=0.03)
    assert plan.flops == pytest.approx(3 * cost.flops)


def test_smaller_images_count_by_their_area():
    plan, recipe = plan_of({"progressive_resizing": {"start": 0.5, "until": "50%"}})
    assert plan.arms[0].flops == pytest.approx(plan_of({})[0].arms[0].flops * 0.625)
    assert flops_of_training(recipe) == pytest.approx(plan.arms[0].flops, rel=0.1)


def test_flops_and_parameters_are_those_of_the_treated_network():
    plain, _ = plan_of({})
    stem, recipe = plan_of({"treatments": ["conv_stem"]}, data={"source": "shapes:40"}, batch_size=20)
    assert stem.arms[0].parameters != plain.arms[0].parameters
    assert stem.arms[0].size == (32, 32)
    assert flops_of_training(recipe) == pytest.approx(stem.arms[0].flops * STEPS / stem.arms[0].steps, rel=0.05)


@pytest.mark.parametrize("name", ["pit_ti_224", "swin_tiny_patch4_window7_224", "mixer_s32_224", "resnet18"])
def test_a_network_that_computes_nothing_counts_as_one_that_does(name):
    spec = ImageSpec(10, 3, (224, 224))
    network = create_network(build_recipe({"model": name}), spec).eval()
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        network.requires_grad_(False)(torch.zeros(1, 3, 224, 224))
    assert forward_flops(network, spec) == counter.get_total_flops() > 1e8


def test_precision_is_time_and_not_flops():
    (fp32, _), (bf16, _) = plan_of({}), plan_of({}, precision="bf16")
    assert bf16.flops == fp32.flops
    assert bf16.gpu_hours == pytest.approx(fp32.gpu_hours / 16)


def test_what_cannot_be_built_is_said_and_so_is_a_length_in_time():
    with pytest.raises(ModelError, match="The network of 'arm' cannot be built: spatial_smoothing does not fit"):
        plan_of({"treatments": ["spatial_smoothing"]})
    with pytest.raises(RecipeError, match="'arm' is not known beforehand: it trains for a given time"):
        plan_of({"max_time": "1m"})


def test_the_papers_data_need_not_be_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert data_facts(DataConfig(source="cifar10")) == (
        45_000,
        ImageSpec(10, 3, (32, 32)),
    )  # a tenth is for val
    assert data_facts(DataConfig(source="imagenet")) == (1_281_167 - 128_117, ImageSpec(1000, 3, (224, 224)))
    plan = plan_study("C6")
    assert [cost.arm for cost in plan.arms] == ["ViT", "ViT + SAM"]
    assert [(cost.classes, cost.size, cost.steps) for cost in plan.arms] == [(10, (32, 32), 391)] * 2
    assert plan.arms[1].flops == 2 * plan.arms[0].flops
    assert (plan.seeds, plan.runs) == (5, 10)
    assert not list(tmp_path.iterdir())


def test_data_that_are_there_are_counted(photo_folder):
    images, spec = data_facts(DataConfig(source=str(photo_folder)))
    assert (images, spec.num_classes, spec.in_chans) == (32, 2, 3)  # of 40, a tenth each for val and test
    assert open_data(str(photo_folder)).size == spec.img_size


def test_the_scale_may_say_what_the_data_are():
    paper = {"images": 1000, "classes": 7, "size": 16, "seeds": 2, "base": {"data": {"limit": None}}}
    asked = tiny_study(base=BASE, arms={"arm": {}}, expectations=[SAYS], paper_scale=paper)
    (cost,) = plan_study(asked, scale="paper").arms
    assert (cost.classes, cost.size, cost.steps) == (7, (16, 16), 100)
    assert plan_study(asked, scale="paper").seeds == 2
    assert plan_study(asked, scale="paper", seeds=1).runs == 1


def test_the_time_on_two_cores_is_the_study_s_own_and_only_if_it_is_conducted_as_written():
    asked = tiny_study(minutes=10.0)
    assert plan_study(asked).minutes == 10
    assert plan_study(asked, seeds=1).minutes == 5
    changed = plan_study(asked, {"steps": 2})
    assert changed.minutes == plan_study(tiny_study(), ["steps=2"]).minutes == changed.flops / TWO_CORES / 60
    assert plan_study(asked, scale="paper").minutes is None


def test_the_paper_s_scale_has_its_own_recipes_seeds_and_result(tmp_path):
    paper = {"base": {"steps": 2}, "arms": {"fast": {"steps": 3}}, "seeds": 1}
    result = study(tiny_study(paper_scale=paper), scale="paper", out=tmp_path)
    assert result.file == tmp_path / "T1-paper.json"
    assert result.seeds == (0,)
    for arm, steps in (("slow", 2), ("fast", 3)):
        metrics = tmp_path / "pool" / result.runs[arm][0] / "metrics.jsonl"
        assert metrics.read_text().count('"train"') == steps


def test_the_paper_s_scale_has_its_own_numbers_for_the_arms_of_a_trend(tmp_path):
    grows = {"says": "weights grow with the rate", "measure": "norm", "grows": {1.0: "slow", 2.0: "fast"}}
    asked = tiny_study(expectations=[grows], paper_scale={"positions": {2.0: 16.0}})
    for scale, doublings in (("cpu", 1), ("paper", 4)):
        result = study(asked, scale=scale, seeds=1, out=tmp_path)
        slow, fast = (result.values[arm][0]["norm"] for arm in ("slow", "fast"))
        assert result.verdict.comparisons[0].mean == pytest.approx((fast - slow) / doublings)
        assert result.study == asked


@pytest.mark.parametrize(
    ("positions", "sentence"),
    [({3.0: 4.0}, "paper_scale.positions names 3, which no trend has"), ({2.0: 1.0}, "two arms of 's' one number")],
)
def test_numbers_of_the_paper_s_scale_are_those_of_trends_and_differ(positions, sentence):
    grows = {"says": "s", "measure": "norm", "grows": {1.0: "slow", 2.0: "fast"}}
    with pytest.raises(RecipeError, match=sentence):
        tiny_study(expectations=[grows], paper_scale={"positions": positions})
