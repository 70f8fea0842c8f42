"""The plan of a run: against formulas, real passes, real steps and real starts."""

import copy
import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.probes.test_cost import vit_flops
from vitclinic import list_treatments, plan_run, train
from vitclinic._core.distributed import Distributed
from vitclinic._core.errors import DataError, RecipeError, VitclinicError
from vitclinic.cli import main
from vitclinic.data import Batch, open_data
from vitclinic.models.cost import peak_bytes
from vitclinic.training import build_recipe
from vitclinic.training.display import describe_plan
from vitclinic.training.passes import mean_losses
from vitclinic.training.trainer import Trainer
from vitclinic.treatments import Treatment, parse_treatments

CPU = torch.device("cpu")
VIT = {"name": "vit_tiny_fitted", "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
RECIPE = {"model": VIT, "data": {"source": "shapes:100", "augment": "none"}, "batch_size": 20, "epochs": 3}


def planned(**changes):
    return plan_run({**RECIPE, **changes})


def trainer_of(**changes):
    recipe = build_recipe({**RECIPE, **changes})
    dataset = open_data(recipe.data, size=recipe.image_size, channels=recipe.model.in_chans)
    return Trainer(recipe, dataset, 10, Distributed(), CPU)


def test_flops_and_parameters_against_formulas():
    plan = planned()
    width, tokens = 24, 17
    block = 4 * width + 12 * width**2 + 9 * width  # norms, four matrices with their biases
    around = (3 * 64 + 1) * width + width + tokens * width + 2 * width + (width + 1) * 10
    assert plan.parameters == plan.trainable == 2 * block + around
    assert plan.forward_flops == vit_flops(32, 8, width, 2, 10)
    assert plan.step_flops == 3 * 20 * plan.forward_flops
    assert (plan.steps, plan.images_seen, plan.total_flops) == (15, 300, 15 * plan.step_flops)


def test_optimizer_groups_are_matrices_and_the_rest():
    decayed, free = planned().optimizer
    blocks = 2 * 12 * 24**2
    assert decayed.parameters == blocks + 3 * 64 * 24 + 240
    assert (decayed.tensors, decayed.weight_decay, free.weight_decay) == (2 * 4 + 2, 0.05, 0.0)
    assert decayed.parameters + free.parameters == planned().parameters


def test_processes_that_divide_the_weights_hold_a_part_and_what_they_gather():
    plan, width = planned(parallel="fsdp"), 24
    memory, block = plan.memory, 12 * width**2 + 13 * width
    assert memory.gathered == 4 * (3 * block + 2 * (plan.parameters - 2 * block))
    kept = memory.weights + memory.gradients + memory.optimizer
    assert memory.of_process(4) == kept // 4 + memory.gathered + (memory.images + memory.activations) // 4
    assert planned().memory.of_process(4) == kept + (memory.images + memory.activations) // 4
    assert "in each of 4" in describe_plan(plan)["memory"]
    assert not any("one process" in note for note in plan.notes)
    with pytest.raises(RecipeError, match="precision=fp16"):
        planned(parallel="fsdp", precision="fp16")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"treatments": ["conv_stem", "context_broadcasting"]},
        {"precision": "bf16"},
        {"data": {"source": "shapes:100", "augment": "deit"}, "treatments": ["patch_diversity"]},
        {"model": {"name": "resnet18", "channels": [8, 8, 8, 8]}},
    ],
    ids=["plain", "surgery", "bf16", "losses", "resnet"],
)
def test_the_traced_memory_of_a_pass_is_that_of_a_real_one(changes):
    trainer = trainer_of(**changes)
    batch = trainer._convert(trainer.stream[range(20)])
    for parameter in trainer.parameters:
        parameter.grad = torch.zeros_like(parameter)
    real = peak_bytes(lambda: trainer.passes(batch), CPU)
    traced = planned(**changes).memory.activations
    assert traced == pytest.approx(real, rel=0.005)


@pytest.mark.parametrize(
    "optimizer", ["adamw", "lamb", "sgd", {"name": "sgd", "momentum": 0.0}], ids=["adamw", "lamb", "sgd", "no momentum"]
)
def test_the_memory_of_the_optimizer_is_that_of_a_real_one(optimizer):
    trainer = trainer_of(optimizer=optimizer)
    trainer.advance()
    states = trainer.optimizer.state.values()
    real = sum(value.nbytes for state in states for value in state.values() if torch.is_tensor(value))
    memory = planned(optimizer=optimizer).memory
    assert memory.optimizer == real
    assert memory.gradients == sum(parameter.nbytes for parameter in trainer.parameters)


class Wide:
    """Passes of a module that is nearly all weights, so that memory counts copies of them."""

    def __init__(self):
        self.module = nn.Linear(2000, 500, bias=False)
        self.parameters = list(self.module.parameters())
        self.scale = 1.0
        self.processes = 1

    def __call__(self, batch, sync=True, weight=1.0):
        loss = F.mse_loss(self.module(batch.images), batch.targets) * weight
        loss.backward()
        return {"task": loss.detach()}

    def average(self, tensors):
        pass


@pytest.mark.parametrize("options", [{}, {"m": 2}, {"every": 3}], ids=["sam", "m", "looksam"])
def test_sam_holds_as_many_copies_of_the_weights_as_it_says(options):
    (sam,) = parse_treatments([{"sam": {"rho": 0.1, **options}}])
    numbers = torch.arange(4)
    batch = Batch(torch.rand(4, 2000), torch.rand(4, 500), numbers, numbers)

    def peak(rule):
        passes = Wide()
        for parameter in passes.parameters:
            parameter.grad = torch.zeros_like(parameter)
        size = passes.module.weight.nbytes
        return peak_bytes(lambda: rule([batch], passes), CPU) / size

    plain = peak(lambda batches, passes: mean_losses([passes(part) for part in batches]))
    assert peak(sam.step_rule()) - plain == pytest.approx(sam.copies(), abs=0.1)


def test_images_of_a_pass_follow_accumulation_and_m():
    whole = planned().memory
    assert (whole.pass_images, whole.images) == (20, 20 * (3 * 32 * 32 * 4 + 8))
    parts = planned(accumulate=4).memory
    assert parts.pass_images == 5
    assert parts.images == whole.images
    assert parts.activations < whole.activations / 3
    assert planned(treatments=[{"sam": {"m": 5}}]).memory.activations == parts.activations
    assert planned(treatments=[{"sam": {"m": 500}}]).memory.pass_images == 20
    assert planned(ema=0.9).memory.averaged == whole.weights


def test_steps_warm_up_and_notices_are_those_of_a_run(tmp_path):
    changes = {"schedule": {"warmup": 1}, "treatments": ["patch_diversity"], "epochs": 2}
    plan = planned(**changes)
    run = train({**RECIPE, **changes, "out": str(tmp_path / "run")})
    assert run.status["total_steps"] == plan.steps == 10
    rates = [row["lr"] for row in run.metrics if row["kind"] == "train"]
    assert rates.index(max(rates)) == plan.warmup_steps == 5
    assert "patch_diversity overrides the recipe's data.augment" in plan.notes[0]
    assert (plan.augmentation["cutmix_cell"], plan.augmentation["mixup"]) == (8, 0.0)
    assert plan.images == run.data_facts["counts"]
    assert plan.objective_parameters == 25 * 10
    assert plan.trainable == plan.parameters


def test_a_length_in_time_is_left_to_the_start():
    plan = planned(epochs=None, max_time="1h")
    assert (plan.steps, plan.warmup_steps, plan.images_seen, plan.total_flops) == (None, None, None, None)
    assert describe_plan(plan)["length"].startswith("1h, in steps of 20 images")


@pytest.mark.parametrize("name", list_treatments())
def test_every_treatment_can_be_planned(name):
    model = {"name": "resnet18", "channels": [8, 8, 8, 8]} if name == "spatial_smoothing" else {**VIT, "depth": 1}
    plan = planned(treatments=[name], model=model)
    assert not [note for note in plan.notes if "traced" in note]
    assert plan.memory.activations
    assert plan.treatments[name] == parse_treatments([name])[0].model_dump(mode="json")


class Branching(Treatment):
    name = "branching"

    def operate(self, network, spec):
        network.register_forward_hook(lambda module, args, out: out if out.sum().item() > 0 else -out)
        return network


def test_what_cannot_be_traced_is_said():
    plan = planned(treatments=[Branching()])
    assert plan.memory.activations is None
    assert plan.forward_flops is plan.step_flops is None
    assert plan.notes[0].startswith("FLOPs and activations are not known: the network cannot be traced (")
    assert plan.memory.total == sum((plan.memory.weights * 2 - 24, plan.memory.optimizer, plan.memory.images))
    assert describe_plan(plan)["FLOPs"] == "not known"


def test_what_is_no_mistake_here_is_a_note():
    notes = planned(device="cuda", data={"source": "shapes:100"}).notes
    assert torch.cuda.is_available() or "torch finds no CUDA device" in notes[0]


def test_a_magnitude_that_timm_would_lower_in_silence_is_refused():
    with pytest.raises(RecipeError, match="would lower the magnitude of rand-m15-n2 to 10; write rand-m15-n2-mmax15"):
        planned(data={"source": "shapes:100", "augment": {"randaugment": "rand-m15-n2"}})
    assert not planned(data={"source": "shapes:100", "augment": {"randaugment": "rand-m15-n2-mmax15"}}).notes
    assert not planned(data={"source": "shapes:100", "augment": {"randaugment": "rand-m9-n2-mstd0.5"}}).notes


WRONG = [
    {"data": {"source": "/no/such/place"}},
    {"data": {"source": "shapes:100", "limit": 200}},
    {"model": {**VIT, "num_heads": 5}},
    {"model": {**VIT, "head_width": 7}},
    {"model": "vit_tny"},
    {"model": {**VIT, "num_classes": 7}},
    {"treatments": ["spatial_smoothing"]},
    {"treatments": [{"conv_stem": {"strides": [2, 2, 2, 2]}}]},
    {"treatments": ["sam", "samm"]},
    {"data": {"source": "shapes:100", "augment": {"cutmix": 1.0, "cutmix_cell": 5}}},
    {"data": {"source": "shapes:100", "augment": {"randaugment": "rand-x3"}}},
    {"batch_size": 20, "accumulate": 3},
    {"epoch": 3},
]


@pytest.mark.parametrize("changes", WRONG, ids=lambda changes: json.dumps(changes)[:60])
def test_what_is_wrong_shows_as_in_a_start(changes, tmp_path):
    with pytest.raises(VitclinicError) as in_plan:
        plan_run({**RECIPE, **changes})
    with pytest.raises(VitclinicError) as in_start:
        train({**RECIPE, **changes, "out": str(tmp_path / "run")})
    assert (type(in_plan.value), str(in_plan.value)) == (type(in_start.value), str(in_start.value))


def test_a_plan_is_plain_data_and_leaves_the_world_alone(tmp_path, monkeypatch, photo_folder):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VITCLINIC_CACHE", str(tmp_path / "cache"))
    state, before = torch.get_rng_state(), torch.__future__.get_overwrite_module_params_on_conversion()
    plan = plan_run(copy.deepcopy(RECIPE), {"data.source": str(photo_folder), "data.limit": 30})
    plain = json.loads(json.dumps(plan.plain()))
    assert plain["images"] == {"train": 30, "val": 4, "test": 4}
    assert plain["memory"]["total"] == plan.memory.total
    assert plain["recipe"]["optimizer"]["betas"] == [0.9, 0.999]
    assert plain["optimizer"][0]["weight_decay"] == 0.05
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "photos"]
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["surveys"]  # no image was decoded
    assert torch.equal(state, torch.get_rng_state())
    assert torch.__future__.get_overwrite_module_params_on_conversion() == before


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """Run `vitclinic train ...` in an empty folder; return exit code, output and errors."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        monkeypatch.setattr("sys.argv", ["vitclinic", "train", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code or 0, *capsys.readouterr()

    return run


def test_the_command_prints_the_plan_or_json(command, tmp_path):
    words = ["data=cifar100", "model=vit_tiny_fitted", "model.depth=1", "batch_size=500", "epochs=1", "--dry-run"]
    code, out, _ = command(*words)
    assert code == 0
    lines = dict(line.split(maxsplit=1) for line in out.splitlines())
    absent = "CIFAR-100 (not here; its published facts)"
    assert lines["data"] == f"{absent}: 45,000 train, 5,000 val, 10,000 test images; 100 classes, 3 x 32 x 32"
    assert lines["length"] == "90 steps of 500 images: 1 epoch, 45,000 images seen"
    assert lines["schedule"] == "4 steps of warm-up, then cosine to 0"
    plain = json.loads(command(*words, "--json")[1])
    assert (plain["steps"], plain["data_is_here"], plain["memory"]["pass_images"]) == (90, False, 500)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (
            ["--resume", "runs/x", "--dry-run"],
            2,
            "error: --dry-run is for a run that has not started; remove --resume.\n",
        ),
        (["data=nowhere", "--dry-run"], 3, "error: There is no data at 'nowhere'.\n"),
        (["--dry-run"], 2, None),
    ],
)
def test_mistakes_in_the_command(command, words, code, sentence):
    ended, _, errors = command(*words)
    assert ended == code
    assert sentence in (None, errors)


def test_the_papers_data_must_be_there_for_training():
    with pytest.raises(DataError, match=r"^ImageNet does not come with vitclinic, and there is no folder 'imagenet'"):
        train("chen2022-vit-b16-sam")
