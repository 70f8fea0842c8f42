"""Training: recipes, the loop, and run directories."""

from typing import TYPE_CHECKING

from vitclinic._core import make_lazy

if TYPE_CHECKING:
    from vitclinic.training.network import load_model
    from vitclinic.training.overrides import build_recipe, read_shipped_recipes
    from vitclinic.training.plan import Memory, PlannedGroup, RunPlan, plan_run
    from vitclinic.training.recipe import Recipe
    from vitclinic.training.run import Checkpoint, Run
    from vitclinic.training.train import resume, train

__all__ = [
    "Checkpoint",
    "Memory",
    "PlannedGroup",
    "Recipe",
    "Run",
    "RunPlan",
    "build_recipe",
    "load_model",
    "plan_run",
    "read_shipped_recipes",
    "resume",
    "train",
]

make_lazy(__name__)
