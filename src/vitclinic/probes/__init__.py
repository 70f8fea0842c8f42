"""Probes: what can be measured of a network, and the contract that all of them follow."""

from vitclinic.probes.applying import obstacle_to
from vitclinic.probes.cost import Cost
from vitclinic.probes.curvature.flatness import Flatness
from vitclinic.probes.curvature.landscape import Landscape
from vitclinic.probes.norms import Norms
from vitclinic.probes.parameters import parameters_by_unit
from vitclinic.probes.probe import DoesNotApply, Need, OwningProbe, Probe, Result, StreamingProbe, Tally, unit_row
from vitclinic.probes.records import conditions_of, seen_by
from vitclinic.probes.registry import known_probes, parse_probes, register
from vitclinic.probes.restoring import left_as_it_was
from vitclinic.probes.running import estimated_seconds, measure
from vitclinic.probes.subject import Subject, Training

__all__ = [
    "Cost",
    "DoesNotApply",
    "Flatness",
    "Landscape",
    "Need",
    "Norms",
    "OwningProbe",
    "Probe",
    "Result",
    "StreamingProbe",
    "Subject",
    "Tally",
    "Training",
    "conditions_of",
    "estimated_seconds",
    "known_probes",
    "left_as_it_was",
    "measure",
    "obstacle_to",
    "parameters_by_unit",
    "parse_probes",
    "register",
    "seen_by",
    "unit_row",
]
