"""Probes: what can be measured of a network, and the contract that all of them follow."""

from vitclinic.probes.applying import obstacle_to
from vitclinic.probes.behaviour.corruptions import Corruptions
from vitclinic.probes.cost import Cost
from vitclinic.probes.curvature.flatness import Flatness
from vitclinic.probes.curvature.landscape import Landscape
from vitclinic.probes.curvature.ntk import NTK
from vitclinic.probes.curvature.sharpness import Sharpness
from vitclinic.probes.curvature.spectrum import HessianSpectrum
from vitclinic.probes.curvature.trajectory import Trajectory
from vitclinic.probes.norms import Norms
from vitclinic.probes.parameters import parameters_by_unit
from vitclinic.probes.probe import DoesNotApply, Need, OwningProbe, Probe, Result, StreamingProbe, Tally, unit_row
from vitclinic.probes.records import conditions_of, seen_by
from vitclinic.probes.registry import known_probes, parse_probes, register, usual_probes
from vitclinic.probes.restoring import left_as_it_was
from vitclinic.probes.running import estimated_seconds, measure
from vitclinic.probes.subject import PastWeights, Subject, Training

__all__ = [
    "NTK",
    "Corruptions",
    "Cost",
    "DoesNotApply",
    "Flatness",
    "HessianSpectrum",
    "Landscape",
    "Need",
    "Norms",
    "OwningProbe",
    "PastWeights",
    "Probe",
    "Result",
    "Sharpness",
    "StreamingProbe",
    "Subject",
    "Tally",
    "Training",
    "Trajectory",
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
    "usual_probes",
]
