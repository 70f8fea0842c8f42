"""Running probes, and recording each outcome: a result, the reason why it does not apply, or the error."""

from __future__ import annotations

import importlib.metadata
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from vitclinic._core.config import validate
from vitclinic._core.errors import EmptySplitError, NoAttentionMapError, UnknownStructureError, VitclinicError
from vitclinic._core.records import Measurement, Status, plain_data
from vitclinic.probes.digest import find_integer_weights, find_packed_weights
from vitclinic.probes.guards import halving, preserve_state
from vitclinic.probes.loading import Data, load_subject
from vitclinic.probes.probe import DoesNotApply, OwningProbe, Probe, Result, StreamingProbe
from vitclinic.probes.shared_pass import Outcome, run_shared_pass
from vitclinic.probes.subject import Subject

log = logging.getLogger(__name__)

_PACKAGES = ("vitclinic", "torch", "timm", "numpy")
_NOT_APPLYING = (DoesNotApply, UnknownStructureError, NoAttentionMapError)
"""Errors meaning that a probe does not apply; any other error is a failure."""
_WITHOUT_GRADIENT = "does not require grad and does not have a grad_fn"
"""What torch says of an output that was computed without gradients."""


def record(probe: Probe, subject: Subject, outcome: Result | Exception, duration: float) -> Measurement:
    """Return the outcome of a probe as a measurement; a result that is not valid is recorded as a failure."""
    subject = view_of(probe, subject)
    try:
        return _build_measurement(probe, subject, outcome, duration)
    except Exception as error:  # a probe may return anything
        log.info("the result of %s cannot be recorded", probe.name, exc_info=error)
        return _build_measurement(probe, subject, error, duration)


def view_of(probe: Probe, subject: Subject) -> Subject:
    """Return the view of the subject that a probe measures; the subject itself if the probe fails to choose one.

    Args:
        probe: The probe.
        subject: Network and images.
    """
    try:
        return probe.view(subject)
    except Exception as error:  # a probe may raise anything
        log.info("%s cannot choose its images of %s", probe.name, subject.name, exc_info=error)
        return subject


def collect_conditions(probe: Probe, subject: Subject) -> dict[str, Any]:
    """Return what a result depends on besides subject, data, options and seed, as plain data for the record."""
    conditions: dict[str, Any] = plain_data(probe.conditions(subject), "conditions")
    return conditions


def describe_conditions(probe: Probe, subject: Subject) -> dict[str, Any]:
    """Return the conditions of a measurement or, if the probe fails to state them, the reason.

    Args:
        probe: The probe.
        subject: Network and images.
    """
    try:
        return collect_conditions(probe, subject)
    except Exception as error:  # a probe may raise anything
        log.info("%s failed to state its conditions", probe.name, exc_info=error)
        return {"unknown": _status(error)[1]}


def _build_measurement(probe: Probe, subject: Subject, outcome: Result | Exception, duration: float) -> Measurement:
    if not isinstance(outcome, Result | Exception):
        raise TypeError(f"the probe returned a {type(outcome).__name__}; expected a Result")
    result = outcome if isinstance(outcome, Result) else Result()
    status, reason = (result.status, result.reason) if isinstance(outcome, Result) else _status(outcome)
    record = {
        "probe": probe.name,
        "revision": probe.revision,
        "config": probe.model_dump(mode="json"),
        "subject": subject.digest,
        "data": subject.data_digest,
        "conditions": describe_conditions(probe, subject),
        "status": status,
        "reason": reason,
        "scalars": dict(result.scalars),
        "units": list(result.units),
        "arrays": dict(result.arrays),
        "facts": probe.facts(),
        "provenance": {
            "seed": subject.seed,
            "mode": result.mode,
            "device": str(subject.device),
            "batch_size": subject.batch_size,
            "duration": duration,
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "versions": {name: importlib.metadata.version(name) for name in _PACKAGES},
            "images": len(subject),
        },
    }
    return validate(Measurement, record)


def _status(error: Exception) -> tuple[Status, str]:
    if isinstance(error, _NOT_APPLYING):
        return "does_not_apply", str(error)
    text = " ".join(str(error).split())
    if _WITHOUT_GRADIENT in text:
        return "failed", "the network's output has no gradient: its forward runs without (torch.no_grad, detach)."
    return "failed", text if isinstance(error, VitclinicError) and text else f"{type(error).__name__}: {text}"


def find_obstacle(probe: Probe, subject: Subject) -> Exception | None:
    """Return the reason why `probe` cannot measure `subject`; None if it can.

    The reason is a `DoesNotApply`, or the error of a broken network or probe.

    Args:
        probe: The probe.
        subject: Network and images.
    """
    try:
        subject = probe.view(subject)
        _check_applies(probe, subject)
        probe.check(subject)
        probe.forwards(subject)
        collect_conditions(probe, subject)
    except EmptySplitError as error:  # of a split that the probe chose; the exam's own has images
        log.info("%s cannot measure %s", probe.name, subject.name, exc_info=error)
        return DoesNotApply(f"it is measured on {error.split} images, and the data has none.")
    except Exception as error:  # a failing probe is a result; the others go on
        log.info("%s cannot measure %s", probe.name, subject.name, exc_info=error)
        return error
    return None


def _find_common_obstacle(probe: Probe, subject: Subject) -> Exception | None:
    """Return the reason why `probe` cannot measure in one of the processes that measure together; None if it can."""

    def refuse() -> None:
        obstacle = find_obstacle(probe, subject)
        if obstacle is not None:
            raise obstacle

    try:
        subject.distributed.agree(refuse)
    except Exception as error:  # find_obstacle returns all of them
        log.info("%s cannot measure %s", probe.name, subject.name, exc_info=error)
        return error
    return None


def _check_applies(probe: Probe, subject: Subject) -> None:
    needs = probe.requirements(subject)
    if needs & {"scores", "labels", "logits"} and subject.features is not None:
        raise DoesNotApply(f"the network has no class scores: it returns {subject.features}.")
    if needs & {"scores", "labels"} and subject.drawn:
        raise DoesNotApply(
            f"the classifier was drawn at random, because the weights have none of this size"
            f" ({', '.join(subject.drawn)})."
        )
    if "labels" in needs:
        _check_classes(subject)
    if "logits" in needs and subject.returns_probabilities:
        raise DoesNotApply(
            "the network returns probabilities, and the loss is computed from logits. Leave out its softmax, or pass"
            " output=torch.log."
        )
    if "logits" in needs and subject.returns_sigmoids:
        raise DoesNotApply(
            "the network returns the probability of each class by itself (a sigmoid: they do not sum to 1), and the"
            " loss is computed from logits of classes that exclude each other. If only one class is right, leave out"
            " its sigmoid, or pass output=torch.logit."
        )
    if "gradients" in needs:
        _check_gradients(subject)
    if needs & {"anatomy", "attention"}:
        units = subject.anatomy.units
        if "attention" in needs and not any(unit.attention for unit in units):
            raise DoesNotApply(f"a {subject.anatomy.family} has no attention maps.")


def _check_gradients(subject: Subject) -> None:
    parameters = list(subject.network.parameters())
    quantized = [*find_packed_weights(subject.network), *find_integer_weights(subject.network).values()]
    if quantized:
        count = sum(weight.numel() for weight in quantized)
        raise DoesNotApply(f"{count:,} of the network's weights are quantized and have no gradient.")
    if not any(p.is_floating_point() for p in parameters):
        raise DoesNotApply("the network has no trainable parameters.")


def _check_classes(subject: Subject) -> None:
    classes, names = subject.classes, subject.output_names
    if not classes:
        raise DoesNotApply("the data has no labels.")
    if subject.outputs != len(classes):
        raise DoesNotApply(
            f"the network has {subject.outputs} outputs and the data {len(classes)} classes, "
            "so the labels do not match the outputs."
        )
    if names is not None and names != classes:
        at = next(index for index, pair in enumerate(zip(names, classes, strict=True)) if pair[0] != pair[1])
        raise DoesNotApply(
            f"output {at} of the network is '{names[at]}' and label {at} of the data is '{classes[at]}', "
            "so the labels do not match the outputs."
        )


def measure(
    subject: Subject, probes: Sequence[Probe], done: Callable[[Measurement], None] = lambda measurement: None
) -> list[Measurement]:
    """Measure a subject with several probes; streaming probes share one forward pass.

    The state of the network is restored exactly. A probe that fails gives a measurement with status `failed`.

    Args:
        subject: Network and images (see `load_subject`).
        probes: Probes to run.
        done: Called with each measurement as soon as it is there.

    Returns:
        One measurement per probe, in their order.

    Example:
        >>> import timm, torch
        >>> from vitclinic.probes import Norms, Sparsity
        >>> model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=10)
        >>> subject = load_subject(model, [(torch.rand(8, 3, 32, 32), torch.arange(8))])
        >>> [measurement.status for measurement in measure(subject, [Norms(), Sparsity()])]
        ['ok', 'ok']
    """
    measurements: dict[str, Measurement] = {}
    batch_size = subject.batch_size
    for probe, outcome, seconds in _outcomes(subject, probes):
        measurements[probe.name] = record(probe, subject, outcome, seconds)
        done(measurements[probe.name])
    subject.batch_size = batch_size
    return [measurements[probe.name] for probe in probes]


def measure_one(probe: Probe, model: nn.Module, data: Data, **options: Any) -> Measurement:
    """Return the measurement of a network by one probe; raise the error if it fails or does not apply.

    The probe measures the images of a loader, whichever split it would choose by itself.
    """
    subject = load_subject(model, data, **options)
    if subject.dataset.undivided:
        subject = subject.on_dataset(replace(subject.dataset, undivided=False))
    ((_, outcome, seconds),) = _outcomes(subject, [probe])
    if isinstance(outcome, Exception):
        raise outcome
    return record(probe, subject, outcome, seconds)


def _outcomes(subject: Subject, probes: Sequence[Probe]) -> Iterator[tuple[Probe, Outcome, float]]:
    """Yield each probe with its outcome and the seconds it took, streaming probes first."""
    batch_size = subject.batch_size
    streaming: dict[str, StreamingProbe] = {}
    owning: list[OwningProbe] = []
    for probe in probes:
        obstacle = _find_common_obstacle(probe, subject)
        if obstacle is not None:
            yield probe, obstacle, 0.0
        elif isinstance(probe, StreamingProbe):
            streaming[probe.name] = probe
        elif isinstance(probe, OwningProbe):
            owning.append(probe)
    if streaming:
        started = time.perf_counter()
        outcomes = _run_streaming(subject, streaming)
        seconds = time.perf_counter() - started
        yield from ((streaming[name], outcome, seconds) for name, outcome in outcomes.items())
    for probe in owning:
        view = probe.view(subject)
        view.batch_size = batch_size
        started = time.perf_counter()
        outcomes = _attempt(view, [probe.name], partial(_run_owning, view, probe))
        yield probe, outcomes[probe.name], time.perf_counter() - started


def _run_streaming(subject: Subject, probes: dict[str, StreamingProbe]) -> dict[str, Outcome]:
    """Run the shared pass; if it fails as a whole, run one pass per probe to find the probe that fails."""
    outcomes = _attempt(subject, probes, lambda: run_shared_pass(subject, probes))
    failed_as_a_whole = len(probes) > 1 and len(set(map(id, outcomes.values()))) == 1
    if not failed_as_a_whole:
        return outcomes
    return {name: _run_streaming(subject, {name: probe})[name] for name, probe in probes.items()}


def _run_owning(subject: Subject, probe: OwningProbe) -> dict[str, Outcome]:
    return {probe.name: probe.measure(subject)}


def _attempt(subject: Subject, names: Iterable[str], attempt: Callable[[], dict[str, Outcome]]) -> dict[str, Outcome]:
    """Run `attempt` and restore the network after every try; if it fails, every probe gets the error as its outcome."""

    def attempt_and_restore() -> dict[str, Outcome]:
        with preserve_state(subject.network, subject.seed):
            return subject.distributed.agree(
                attempt
            )  # running out of memory included: all processes restart with half the batch

    what = f"{subject.name}, {' and '.join(names)}"
    try:
        return halving(subject, what, attempt_and_restore)
    except Exception as error:  # a failing probe is a result; the others go on
        log.info("%s failed", what, exc_info=error)
        return dict.fromkeys(names, error)
