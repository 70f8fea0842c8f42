"""Studies: many runs over arms and seeds, each trained once, and what they say."""

from vitclinic.studies.runner import Outcome, Watcher, run_all
from vitclinic.studies.store import ENDED, Pool, drop_weights

__all__ = ["ENDED", "Outcome", "Pool", "Watcher", "drop_weights", "run_all"]
