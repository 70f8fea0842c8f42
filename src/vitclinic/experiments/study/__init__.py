"""Studies: many runs over arms and seeds, each trained once, and what they say."""

from typing import TYPE_CHECKING

from vitclinic._core.lazy import make_lazy

if TYPE_CHECKING:
    from vitclinic.experiments.pool import ENDED, Pool, drop_weights
    from vitclinic.experiments.runner import Outcome, Watcher, run_all

__all__ = ["ENDED", "Outcome", "Pool", "Watcher", "drop_weights", "run_all"]

make_lazy(__name__)
