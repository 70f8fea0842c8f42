"""Names of what there is: models, probes, treatments, tasks, datasets, recipes and studies.

None of these functions imports torch. `vitclinic list` prints the facts about each.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from fnmatch import fnmatch


def list_models(pattern: str | None = None) -> list[str]:
    """Return every name that `create_model` and `model=` take: timm's, and ours.

    Args:
        pattern: Only names like this, as in timm: `"vit_tiny*"`.

    Example:
        >>> list_models("alternet5*")
        ['alternet50']
    """
    if "timm" in sys.modules:  # others may have added to its registry
        import timm.models

        import vitclinic.models  # noqa: F401  (adds our networks)

        return _matching(timm.models.list_models(), pattern)
    from vitclinic._core.sources import read_model_names

    return _matching(read_model_names(), pattern)


def list_probes(pattern: str | None = None) -> list[str]:
    """Return the names of all probes: ours and those of installed packages.

    Args:
        pattern: Only names like this: `"attention*"`.

    Example:
        >>> list_probes("attention*")
        ['attention_distance', 'attention_entropy', 'attention_maps']
    """
    from vitclinic.probes.probe import PROBES

    return _matching(PROBES.names(), pattern)


def list_treatments(pattern: str | None = None) -> list[str]:
    """Return the names of all treatments: ours and those of installed packages.

    Args:
        pattern: Only names like this: `"*attention"`.

    Example:
        >>> list_treatments("*attention")
        ['local_attention']
    """
    from vitclinic.treatments.treatment import TREATMENTS

    return _matching(TREATMENTS.names(), pattern)


def list_tasks(pattern: str | None = None) -> list[str]:
    """Return the names of all tasks: ours and those of installed packages.

    Args:
        pattern: Only names like this.

    Example:
        >>> "classification" in list_tasks()
        True
    """
    from vitclinic.tasks.task import TASKS

    return _matching(TASKS.names(), pattern)


def list_datasets(pattern: str | None = None) -> list[str]:
    """Return what `data=` takes: the embedded sets by name, and forms such as `hf:NAME`.

    Args:
        pattern: Only names like this.

    Example:
        >>> list_datasets("d*")
        ['digits']
    """
    from vitclinic.data.config import DATASETS

    return _matching(DATASETS, pattern)


def list_recipes(pattern: str | None = None) -> list[str]:
    """Return the names of the shipped recipes; those that begin with a paper's key are at that paper's scale.

    Args:
        pattern: Only names like this: `"chen2022*"`.

    Example:
        >>> list_recipes("wang2022*")
        ['wang2022-deit-s', 'wang2022-deit-s-convstem']
    """
    from vitclinic.training.overrides import read_shipped_recipes

    return _matching(read_shipped_recipes(), pattern)


def list_studies(pattern: str | None = None) -> list[str]:
    """Return the claims of the papers that there is a study of, in the papers' order.

    Args:
        pattern: Only names like this: `"C*"`.

    Example:
        >>> list_studies("C6")
        ['C6']
    """
    from vitclinic.experiments.study.catalogue import shipped_studies

    return _matching(shipped_studies(), pattern)


def _matching(names: Iterable[str], pattern: str | None) -> list[str]:
    return [name for name in names if pattern is None or fnmatch(name, pattern)]
