"""Whether a probe can measure a subject: it has a meaning there, and nothing about the two is broken."""

from __future__ import annotations

import logging

from vitclinic.errors import EmptySplitError
from vitclinic.probes.probe import DoesNotApply, Probe
from vitclinic.probes.records import stated_conditions
from vitclinic.probes.subject import Subject

log = logging.getLogger(__name__)


def obstacle_to(probe: Probe, subject: Subject) -> Exception | None:
    """Why `probe` cannot measure `subject`: a DoesNotApply, or the error of a network or a probe that is broken."""
    try:
        subject = probe.view(subject)
        _check_applies(probe, subject)
        probe.check(subject)
        probe.forwards(subject)
        stated_conditions(probe, subject)
    except EmptySplitError as error:  # of a split of the probe's own choice: the exam's has some
        log.info("%s cannot measure %s", probe.name, subject.name, exc_info=error)
        return DoesNotApply(f"it is measured on images of the {error.split} split, and the data has none.")
    except Exception as error:  # a failing probe is a result; the others go on
        log.info("%s cannot measure %s", probe.name, subject.name, exc_info=error)
        return error
    return None


def _check_applies(probe: Probe, subject: Subject) -> None:
    if "labels" in probe.needs:
        _check_classes(subject)
    if "gradients" in probe.needs and not any(p.is_floating_point() for p in subject.network.parameters()):
        raise DoesNotApply("the network has no parameters with a gradient.")
    if probe.needs & {"anatomy", "attention"}:
        units = subject.anatomy.units
        if "attention" in probe.needs and not any(unit.attention for unit in units):
            raise DoesNotApply(f"a {subject.anatomy.family} has no attention maps.")


def _check_classes(subject: Subject) -> None:
    classes, names = subject.classes, subject.output_names
    if subject.outputs != len(classes):
        raise DoesNotApply(
            f"the network tells {subject.outputs} classes apart and the data has {len(classes)}, "
            "so that its labels do not mean the network's outputs."
        )
    if names is not None and names != classes:
        at = next(index for index, pair in enumerate(zip(names, classes, strict=True)) if pair[0] != pair[1])
        raise DoesNotApply(
            f"output {at} of the network means '{names[at]}' and label {at} of the data '{classes[at]}', "
            "so that its labels do not mean the network's outputs."
        )
