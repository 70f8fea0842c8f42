"""The trainer: network, optimizer and data stream of a run, one optimizer step at a time."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from timm.utils.model_ema import ModelEmaV3
from torch import Tensor, nn

from vitclinic._core.distributed import Distributed
from vitclinic._core.errors import ModelError
from vitclinic._core.memory import is_out_of_memory, release_memory
from vitclinic.data import Batch, Dataset
from vitclinic.models import Normalized
from vitclinic.tasks.criterion import Moment
from vitclinic.training.drop_path import LateDropPath
from vitclinic.training.init import InitialWeights
from vitclinic.training.layer_decay import freeze_units, rate_scales
from vitclinic.training.network import (
    Learner,
    adapt_augmentation,
    build_criterion,
    build_network,
    build_objectives,
    check_memory,
)
from vitclinic.training.optimizer import build_optimizer
from vitclinic.training.parallel import (
    REACHES_IN,
    OwnParts,
    Shards,
    choose_blocks,
    clip_gradients,
    count_micro_batches,
    describe_sharing,
    wrap_in_ddp,
)
from vitclinic.training.passes import Passes, choose_early_rule, choose_step_rule
from vitclinic.training.recipe import Recipe
from vitclinic.training.replanning import Course
from vitclinic.training.resizing import ImageSizes, choose_sizes, shrink
from vitclinic.training.rows import Row
from vitclinic.training.schedule import Schedule
from vitclinic.training.state import collect_state, restore_state
from vitclinic.treatments import Losses, MixedSteps, StepRule

log = logging.getLogger(__name__)

EXPLODED = 10.0
"""A loss this many times that of the first step counts as divergence."""
STUCK = 50
"""This many steps in a row without a finite gradient count as divergence; a loss scaler needs a few to adapt."""

SCORES_VAL = (
    "The data has no test images and none are held out: test scores are of val, on which the best checkpoint is"
    " selected, and the last is not."
)


class Trainer:
    """Network, optimizer and data stream of a run; `advance()` makes one step and returns its row of metrics."""

    def __init__(
        self,
        recipe: Recipe,
        dataset: Dataset,
        total_steps: int,
        distributed: Distributed,
        device: torch.device,
        init: InitialWeights | None = None,
    ) -> None:
        self.recipe, self.dataset, self.distributed, self.device = recipe, dataset, distributed, device
        self.step = 0
        self.first_loss: float | None = None
        self.skipped = 0
        self.dtype = torch.float64 if recipe.precision == "fp64" else torch.float32
        sharded = recipe.parallel == "fsdp" and distributed.size > 1
        self.accumulate = self.planned_accumulate = count_micro_batches(recipe, distributed, sharded)
        self.micro_batch = recipe.batch_size // (self.accumulate * distributed.size)

        self.spec = spec = recipe.task.frame(dataset.spec)
        check_memory(self.micro_batch, (spec.in_chans, *spec.img_size))
        treatments = recipe.treatments
        network, self.loaded = build_network(recipe, dataset, init)
        home = torch.device("cpu") if sharded else device  # the device may not hold the whole
        network = network.to(home, self.dtype)
        # Copy before any objective adds hooks to the network.
        self.shards = Shards(network, distributed, device) if sharded else None
        self.ema = ModelEmaV3(network, decay=recipe.ema, use_warmup=True) if recipe.ema and not sharded else None
        objectives = build_objectives(recipe, network, spec)
        self.rule = choose_step_rule(treatments)
        self.early_rule = choose_early_rule(treatments)
        self.rule_start = max((t.step_rule_start() for t in treatments if t.step_rule() is not None), default=0.0)
        transforms = (t.batch_transform(network.trunk, spec) for t in treatments)
        self.transforms = [transform for transform in transforms if transform is not None]
        augment, self.notices = adapt_augmentation(recipe, network.trunk, spec)
        if self.loaded is not None:
            self.notices = [*self.loaded.notices, *self.notices]

        self.network: Normalized = network
        self.task = recipe.resolved_task
        self.criterion = build_criterion(recipe, network, spec)
        self.learner = Learner(network, self.task, objectives, self.criterion).to(home, self.dtype).train()
        freeze_units(recipe, network, spec)
        self.drop_path = LateDropPath(recipe.late_drop_path, network)
        self.optimizer = build_optimizer(recipe.optimizer, self.learner, network, rate_scales(recipe, network, spec))
        self.decays = [group["weight_decay"] for group in self.optimizer.param_groups]
        self.cell = augment.cutmix_cell
        self._stages = choose_sizes(recipe.progressive_resizing.shares, network, spec, self.cell)  # of a whole network
        self.divided = self._is_divided()
        blocks = None
        if self.shards is not None:
            blocks = choose_blocks(recipe, self.learner, spec, self.divided or self.accumulate > 1)
            self.ema = self.shards.divide(self.learner, blocks, self.optimizer, recipe.ema)
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.scaler = torch.amp.GradScaler(device.type, enabled=recipe.precision == "fp16")
        self.passes = Passes(
            self.learner,
            self.parameters,
            self.scaler,
            ddp=None if sharded else wrap_in_ddp(self.learner, distributed, device),
            compiled=recipe.compile,
            precision=recipe.precision,
            accumulate=self.accumulate,
            processes=distributed.size if sharded else 1,
        )
        self.notices = [*self.notices, *self.task.notices(dataset)]
        self.notices += describe_sharing(recipe, blocks, self.micro_batch * distributed.size)
        self.stream = self.task.stream(dataset, augment, recipe.seed, network)
        self.steps_per_epoch = len(dataset.train) / recipe.batch_size
        self.lay_out(Course(total_steps))
        if recipe.progressive_resizing.shares:
            self.notices.append(self.sizes.describe())
        if recipe.test and dataset.scores_val:
            self.notices.append(SCORES_VAL)
        self.samples: Tensor | None = None
        """Some images of the last step as the network saw them, if the recipe wants a picture of such."""
        self._batches: Iterator[Batch] | None = None

    @property
    def total_steps(self) -> int:
        """The number of steps of the run, as planned last."""
        return self.course.total

    def lay_out(self, course: Course) -> None:
        """Lay the schedules over a run: over its first plan, which new ones bend."""
        self.course = course
        self.schedule = Schedule(self.recipe.schedule, self.steps_per_epoch, course.planned)
        ends = self.recipe.progressive_resizing.ends(self.steps_per_epoch, course.planned)
        self.sizes = ImageSizes(self._stages, ends)

    def plan_anew(self, total_steps: int) -> None:
        """Make the run end after `total_steps` steps; schedules go on from where they are."""
        grows = total_steps > self.total_steps
        self.course.bend(self.step, total_steps)
        if grows:
            self.close()  # what reads ahead may have ended

    @property
    def evaluation_network(self) -> nn.Module:
        """The network to evaluate and export; with `ema`, the one with averaged weights, or the task's teacher.

        With shards it has weights only inside of `evaluation`.
        """
        if self.shards is not None:
            return self.shards.whole
        if self.criterion is not None:
            return self.criterion.exported(self.network if self.ema is None else self.ema.module)
        return self.network if self.ema is None else self.ema.module

    def evaluation(self) -> AbstractContextManager[nn.Module]:
        """Return a context with the whole network to evaluate; with shards, all processes enter it."""
        return nullcontext(self.evaluation_network) if self.shards is None else self.shards.gathered()

    @property
    def epoch(self) -> int:
        """The number of completed epochs."""
        return self.step * self.recipe.batch_size // len(self.dataset.train)

    @property
    def due_rule(self) -> StepRule:
        """The rule of the next step: the treatments' own from a share `rule_start` of the run on."""
        return self.rule if self.is_late else self.early_rule

    @property
    def is_late(self) -> bool:
        """Tell whether the treatments' own step rule is due."""
        return self.course(self.step) >= self.rule_start * self.course.planned - 1e-9

    def step_kinds(self) -> list[tuple[float, StepRule]]:
        """Return the kinds of steps that differ in cost: the share of the run's steps, and a rule that makes such."""
        late = self.rule.kinds() if isinstance(self.rule, MixedSteps) else [(1.0, self.rule)]
        parts = [(self.rule_start, self.early_rule), *((share * (1 - self.rule_start), rule) for share, rule in late)]
        return [(share, rule) for share, rule in parts if share > 0]

    def advance(self, rule: StepRule | None = None) -> Row:
        """Make one step (read, differentiate, clip, update) and return its metrics, the same in every process.

        If the gradient is not finite (then it is so in every process), only the loss scale changes. Reading the loss
        waits for the device; this is what lets us detect a divergence at the step where it happens.

        Args:
            rule: The step rule to use instead of the one that is due, to measure what it costs.
        """
        started = time.perf_counter()
        for group, decay in zip(self.optimizer.param_groups, self.decays, strict=True):
            group["lr"] = self.rate(self.step) * group.get("lr_scale", 1.0)
            group["weight_decay"] = decay * self.decay_factor(self.step)
        self.drop_path(self.course.share(self.step))
        losses = self._differentiate(rule or self.due_rule)
        self.scaler.unscale_(self.optimizer)
        norm = clip_gradients(self.parameters, self.recipe.clip or math.inf)
        stepped = math.isfinite(norm)
        self.skipped = 0 if stepped else self.skipped + 1
        if stepped:
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self.ema is not None and stepped:
            self.ema.update(self.network if self.shards is None else OwnParts(self.network), self.step + 1)
        if self.criterion is not None and stepped:
            self.criterion.finish(self.network)
        self.step += 1
        return self._row(losses, norm, started)

    def _differentiate(self, rule: StepRule) -> Losses:
        """Leave the gradients of the next batch in the parameters; when memory runs out, in twice as many parts."""
        buffers = list(self.learner.buffers())
        while True:
            copies = [buffer.clone() for buffer in buffers]
            try:
                batches = self._prepare(self._next_batches())
                if shown := self.recipe.logging.samples:
                    self.samples = batches[0].images[:shown].detach().clone()
                return rule(batches, self.passes)
            except (RuntimeError, MemoryError) as error:
                if self.shards is not None and "DTensor" in str(error):
                    raise ModelError(REACHES_IN) from error
                if not is_out_of_memory(error):
                    raise
                if self.distributed.size > 1 or self.micro_batch % 2:  # others wait for a gradient; or nothing to halve
                    raise ModelError(
                        f"Out of memory with {self.micro_batch} images at a time: choose a smaller network or"
                        " batch_size, or a larger accumulate."
                    ) from error
            # Outside of the handler, since the error holds on to the tensors of the failed attempt.
            self.optimizer.zero_grad(set_to_none=True)
            for buffer, copy in zip(buffers, copies, strict=True):
                buffer.data.copy_(copy)
            release_memory()
            log.warning(
                "Out of memory with %d images at a time: going on with %d (accumulate=%d), in batches of %d as before.",
                *(self.micro_batch, self.micro_batch // 2, 2 * self.accumulate, self.recipe.batch_size),
            )
            self._divide(2 * self.accumulate)

    def _next_batches(self) -> list[Batch]:
        if self._batches is None:
            self._batches = self.stream.batches(self._requests(), self.recipe.workers, pin=self.device.type == "cuda")
        return [next(self._batches) for _ in range(self.accumulate)]

    def _divide(self, accumulate: int) -> None:
        """Divide each batch into so many micro-batches from the current step on; what was read ahead is read again."""
        self.close()
        self.accumulate = self.passes.accumulate = accumulate
        self.micro_batch = self.recipe.batch_size // (accumulate * self.distributed.size)
        self.divided = self._is_divided()

    def _is_divided(self) -> bool:
        """Return True if the images of a micro-batch go through the network in several passes."""
        return any(t.pass_images(self.micro_batch) < self.micro_batch for t in self.recipe.treatments)

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        return self.recipe.optimizer.lr * self.schedule(self.course(step))

    def decay_factor(self, step: int) -> float:
        """Return the factor on the weight decay of a step: a cosine to `weight_decay_end`, or 1."""
        config = self.recipe.optimizer
        if config.weight_decay_end is None:
            return 1.0
        done = (1 - math.cos(math.pi * self.course(step) / self.course.planned)) / 2
        return 1 + (config.weight_decay_end / config.weight_decay - 1) * done

    def close(self) -> None:
        """Stop the reading processes; a later `advance` starts new ones."""
        self._batches = None

    def find_divergence(self, row: Row) -> str | None:
        """Return the reason if a row of metrics shows a divergence, else None."""
        if not math.isfinite(row["loss"]):
            return f"the {row['kind']} loss became {row['loss']} at step {row['step']}"
        if row["kind"] != "train":
            return None
        if self.first_loss is None:
            self.first_loss = row["loss"]
        if row["loss"] > EXPLODED * max(abs(self.first_loss), 1.0):
            return f"the loss rose to {row['loss']:.3g} at step {row['step']}, from {self.first_loss:.3g} at the start"
        if self.skipped >= STUCK:
            return f"no finite gradient in the {self.skipped} steps up to step {row['step']}"
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return what resuming needs in addition to the exported network.

        With shards, all processes call this and `exported_state`, and the leading one's are whole.
        """
        return collect_state(self)

    def exported_state(self) -> dict[str, Tensor]:
        """Return the weights of the network to evaluate and store."""
        return self.evaluation_network.state_dict() if self.shards is None else self.shards.exported_state()

    def load_exported(self, model: Mapping[str, Tensor]) -> None:
        """Take over the weights of the network to evaluate."""
        (self.evaluation_network.load_state_dict if self.shards is None else self.shards.load_exported)(model)

    def load_state_dict(self, model: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Restore a checkpoint: its exported network and what `state_dict` returned."""
        restore_state(self, model, state)
        halved = state.get("accumulate", self.accumulate)
        if not self.recipe.batch_size % (halved * self.distributed.size):
            self._divide(halved)

    def _requests(self) -> Iterator[range]:
        """Yield this process's positions in the stream, one range per micro-batch, from the current step on."""
        step = self.step
        while step < self.total_steps:  # which may change
            for micro in range(self.accumulate):
                part = micro * self.distributed.size + self.distributed.rank
                start = step * self.recipe.batch_size + part * self.micro_batch
                yield range(start, start + self.micro_batch)
            step += 1

    def _prepare(self, batches: Sequence[Batch]) -> list[Batch]:
        """Return the micro-batches of a step as its passes see them."""
        moved = [self._convert(batch) for batch in batches]
        if self.criterion is None:
            return moved
        moment = Moment(int(self.course(self.step)), self.course.planned)
        with self.passes.autocast():
            return self.criterion.prepare(self.network, moved, moment, self.divided or len(moved) > 1)

    def _convert(self, batch: Batch) -> Batch:
        """Move a batch to the device, apply the task's reading and the treatments' transforms, and resize it."""
        batch = self.task.read(batch.to(self.device, self.dtype))
        for transform in self.transforms:
            batch = transform(batch)
        size = self.sizes(self.course(self.step))
        return batch if size == self.sizes.full else shrink(batch, size, self.cell)

    def _row(self, losses: Losses, norm: float, started: float) -> Row:
        means = self.distributed.sum(lambda: torch.stack([v.double() for v in losses.values()])) / self.distributed.size
        named = dict(zip(losses, means.tolist(), strict=True))
        duration = time.perf_counter() - started
        return {
            "kind": "train",
            "step": self.step,
            "epoch": self.epoch,
            "loss": sum(named.values()),
            "losses": named,
            "lr": self.rate(self.step - 1),
            "grad_norm": norm,
            **({} if self.criterion is None else self.criterion.facts()),
            **({"img_size": list(self.sizes(self.course(self.step - 1)))} if self.sizes.ends else {}),
            "timing": {"images_per_second": round(self.recipe.batch_size / duration, 1)},
        }
