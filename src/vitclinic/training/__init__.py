"""Training: recipes, the loop, and run directories."""

from vitclinic.training.network import load
from vitclinic.training.recipe import Recipe, build_recipe, shipped_recipes
from vitclinic.training.run import Run
from vitclinic.training.train import resume, train

__all__ = ["Recipe", "Run", "build_recipe", "load", "resume", "shipped_recipes", "train"]
