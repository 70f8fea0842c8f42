"""The sections of a report: which probe belongs where, under what title, and what became of it for each network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vitclinic._core.records import Measurement
from vitclinic.reports.figure import Examined


@dataclass(frozen=True)
class About:
    """What a section says of its probe."""

    title: str
    question: str
    """What the probe answers, in one sentence."""


GROUPS: dict[str, dict[str, About]] = {
    "Behaviour": {
        "accuracy": About("Accuracy and calibration", "How often is the network right, and does it know when it is?"),
        "train_nll": About("Likelihood of training images", "How well does it fit what it was trained on?"),
        "corruptions": About("Corrupted images", "How much accuracy is lost to noise, blur, weather and compression?"),
        "frequency_noise": About("Noise by frequency", "Noise of which frequencies hurts it most?"),
        "occlusion": About("Hidden centre", "Does it recognise images whose centre is hidden?"),
        "fgsm": About("One-step attack (FGSM)", "How often does one step along the gradient fool it?"),
        "pgd": About("Iterated attack (PGD)", "How often does a stronger attack of several steps fool it?"),
        "missing_rate": About("Missing rate", "Does it see both of two images that are mixed into one?"),
        "shift": About("Other data", "How well does it do on data of another kind?"),
        "shape_bias": About("Shape or texture", "Does it decide by shape or by texture where the two disagree?"),
    },
    "Representation": {
        "fourier": About("Frequencies by depth", "Which layers damp high frequencies, and which amplify them?"),
        "variance": About("Variance by depth", "Which layers average feature maps, and which spread them?"),
        "cka": About("Similarity of layers (CKA)", "Which layers represent images alike?"),
        "token_similarity": About("Similarity of patches", "Do the patches of an image become alike with depth?"),
        "sparsity": About("Active neurons", "Which share of the neurons is active in each layer?"),
        "lesion": About("Lesions", "How much is lost without one unit?"),
    },
    "Attention": {
        "attention_entropy": About("Density of attention", "How close is attention to uniform?"),
        "attention_distance": About("Reach of attention", "How far does attention look?"),
        "attention_maps": About("Attention maps", "Where on an image does the last layer look?"),
        "cb_scale": About("Context Broadcasting scales", "Which layers want the mean of all tokens?"),
    },
    "Curvature": {
        "sharpness": About("Sharpness", "How curved is the loss where training ended, and which parts are?"),
        "hessian_spectrum": About("Hessian spectrum", "Is the loss convex there (NEP), and how steep is it (APE)?"),
        "flatness": About("Loss under noise", "How much does the loss rise when weights are disturbed?"),
        "landscape": About("Loss landscape", "What does the loss look like around the weights?"),
        "ntk": About("Neural tangent kernel", "How well conditioned, and so how trainable, is the network?"),
        "trajectory": About("Course of training", "Did training go straight to where it ended?"),
    },
    "Network": {
        "cost": About("Cost", "How large and how fast is it?"),
        "norms": About("Norms", "How large are its weights and activations?"),
    },
}

OTHER = "Other probes"
"""The group of what other packages measure."""

USABLE = ("ok", "not_converged")


def about(probe: str) -> About:
    """The section's head; a probe that we do not know has its name."""
    known = {name: said for group in GROUPS.values() for name, said in group.items()}
    return known.get(probe) or About(probe, "A probe of another package.")


def grouped(examined: Sequence[Examined]) -> dict[str, list[str]]:
    """The probes that were measured of some network, by group, in the page's order; groups without any are left out."""
    there = list(dict.fromkeys(probe for one in examined for probe in one.measurements))
    known = {group: [probe for probe in probes if probe in there] for group, probes in GROUPS.items()}
    ours = {probe for probes in known.values() for probe in probes}
    groups = {**known, OTHER: [probe for probe in there if probe not in ours]}
    return {group: probes for group, probes in groups.items() if probes}


def in_order(examined: Sequence[Examined]) -> list[str]:
    """The same probes in one list."""
    return [probe for probes in grouped(examined).values() for probe in probes]


@dataclass(frozen=True)
class Inapplicable:
    """Probes that have no meaning for some networks, for one reason."""

    probes: Sequence[str]
    networks: Sequence[str]
    reason: str


def inapplicable(examined: Sequence[Examined]) -> list[Inapplicable]:
    """What does not apply, gathered: one entry for each reason and the networks that it holds for."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for one in examined:
        for probe, measurement in one.measurements.items():
            if measurement.status == "does_not_apply":
                reasons.setdefault((str(measurement.reason), probe), []).append(one.name)
    gathered: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (reason, probe), networks in reasons.items():
        gathered.setdefault((reason, tuple(networks)), []).append(probe)
    return [Inapplicable(probes, networks, reason) for (reason, networks), probes in gathered.items()]


def of_probe(examined: Sequence[Examined], probe: str) -> list[tuple[int, str, Measurement]]:
    """(place, name, measurement) of the networks that the probe applies to, whatever came of it."""
    found = ((place, one.name, one.measurements.get(probe)) for place, one in enumerate(examined))
    return [
        (place, name, measurement)
        for place, name, measurement in found
        if measurement is not None and measurement.status != "does_not_apply"
    ]
