"""What a step of each arm costs: measured once, and kept in the ledger."""

from __future__ import annotations

import logging
import math

import torch

from vitclinic._core.distributed import ALONE, pick_device
from vitclinic._core.errors import RecipeError, VitclinicError
from vitclinic._core.time import seconds
from vitclinic.data import Dataset
from vitclinic.experiments.prescribe.arms import PLAIN, Arm
from vitclinic.experiments.prescribe.ledger import Ledger
from vitclinic.training import Recipe
from vitclinic.training.budget import Cost, image_counts, measure_cost, measure_costs, total_steps

log = logging.getLogger(__name__)

LEAST_STEPS, ENOUGH_STEPS = 10, 100
"""A trial has an epoch, or `ENOUGH_STEPS` if an epoch is longer, and never less than `LEAST_STEPS`."""


class Costs:
    """The costs of the arms of one prescription, that of the plain recipe measured first."""

    def __init__(self, recipe: Recipe, dataset: Dataset, ledger: Ledger) -> None:
        self.recipe, self.dataset, self.ledger = recipe, dataset, ledger
        self.device = pick_device(recipe.device)
        if self.of(Arm()) is None:
            raise RecipeError(f"The recipe itself cannot be trained: {ledger.left_out[PLAIN]}")

    @property
    def plain(self) -> Cost:
        return self.ledger.costs[PLAIN]

    def of(self, arm: Arm) -> Cost | None:
        """The cost of an arm; None, with the reason in the ledger, if it does not apply to this network and data."""
        ledger = self.ledger
        if arm.name not in ledger.costs and arm.name not in ledger.left_out:
            try:
                ledger.costs[arm.name] = self._measured(self.recipe.add_treatments(arm.treatments))
            except VitclinicError as error:
                ledger.left_out[arm.name] = str(error)
            except Exception as error:  # a treatment of somebody's own may raise anything, and the others go on
                log.info("%s cannot be tried", arm.name, exc_info=error)
                ledger.left_out[arm.name] = f"{type(error).__name__}: {error}"
            ledger.save()
        return ledger.costs.get(arm.name)

    def _measured(self, recipe: Recipe) -> Cost:
        """The cost of a recipe, at the speed that the machine had when the plain one was measured.

        It takes turns with the plain recipe, so that arms that are measured at different times have their ratio right.
        """
        with torch.random.fork_rng():
            if PLAIN not in self.ledger.costs:
                return measure_cost(recipe, self.dataset, ALONE, self.device)
            plain, treated = measure_costs([self.recipe, recipe], self.dataset, ALONE, self.device)
        speed = self.plain.step / plain.step
        return Cost(treated.step * speed, treated.image * speed, treated.start)

    def own_steps(self) -> int:
        """The recipe's own length; that of `max_time` by the cost that is measured already."""
        if self.recipe.max_time is None:
            return total_steps(self.recipe, self.dataset, ALONE, self.device)
        within = seconds(self.recipe.max_time)
        return max(1, self.plain.steps_within(within, self.recipe, image_counts(self.dataset)))

    def least_steps(self) -> int:
        """Fewer than this say nothing about an arm."""
        epoch = math.ceil(len(self.dataset.train) / self.recipe.batch_size)
        return min(self.own_steps(), max(LEAST_STEPS, min(epoch, ENOUGH_STEPS)))
