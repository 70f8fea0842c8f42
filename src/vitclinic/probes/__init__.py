"""Probes: the measurements that can be made of a network, and the contract that all of them follow.

A probe is called on a model and a loader, is named in `vitclinic.examine(..., probes=[...])`, or reads along in your
own evaluation loop (`ProbeCollection`):

    Fourier()(model, loader).scalars["delta_log_amplitude_last"].value

To write a probe, subclass `StreamingProbe` (it reads a forward pass that it shares with others) or `OwningProbe` (it
makes its own passes) and `register` it.
"""

from typing import TYPE_CHECKING

from vitclinic._core import make_lazy

if TYPE_CHECKING:
    from vitclinic._core.records import Measurement, Scalar
    from vitclinic._core.registry import FigureSpec, ProbeFacts
    from vitclinic._core.statistics import RunningMean
    from vitclinic.anatomy.table import parameters_by_unit
    from vitclinic.probes.anatomy import AnatomyProbe
    from vitclinic.probes.attention.cb_scale import CBScale
    from vitclinic.probes.attention.distance import AttentionDistance
    from vitclinic.probes.attention.entropy import AttentionEntropy
    from vitclinic.probes.attention.maps import AttentionMaps
    from vitclinic.probes.attention.softmax_jacobian import SoftmaxJacobian
    from vitclinic.probes.attention.token_kinds import TokenKindsProbe
    from vitclinic.probes.behaviour.accuracy import Accuracy
    from vitclinic.probes.behaviour.corruptions import Corruptions
    from vitclinic.probes.behaviour.detection import DetectionPrecision
    from vitclinic.probes.behaviour.errors import Errors
    from vitclinic.probes.behaviour.fgsm import FGSM
    from vitclinic.probes.behaviour.frequency_noise import FrequencyNoise
    from vitclinic.probes.behaviour.label_errors import LabelErrors
    from vitclinic.probes.behaviour.mask_noise import MaskNoise
    from vitclinic.probes.behaviour.missing_rate import MissingRate
    from vitclinic.probes.behaviour.occlusion import Occlusion
    from vitclinic.probes.behaviour.pgd import PGD
    from vitclinic.probes.behaviour.saliency import Saliency
    from vitclinic.probes.behaviour.segmentation import SegmentationAccuracy
    from vitclinic.probes.behaviour.shape_bias import ShapeBias
    from vitclinic.probes.behaviour.shift import Shift
    from vitclinic.probes.behaviour.slices import Slices
    from vitclinic.probes.behaviour.train_nll import TrainNLL
    from vitclinic.probes.behaviour.vqa import VqaAccuracy
    from vitclinic.probes.collection import ProbeCollection
    from vitclinic.probes.cost import Cost
    from vitclinic.probes.curvature.flatness import Flatness
    from vitclinic.probes.curvature.hessian_spectrum import HessianSpectrum
    from vitclinic.probes.curvature.landscape import Landscape
    from vitclinic.probes.curvature.ntk import NTK
    from vitclinic.probes.curvature.sharpness import Sharpness
    from vitclinic.probes.curvature.trajectory import Trajectory
    from vitclinic.probes.features.alignment_uniformity import AlignmentUniformity
    from vitclinic.probes.features.cka import CKA, block_structure, cka_between
    from vitclinic.probes.features.embedding_map import EmbeddingMap
    from vitclinic.probes.features.fourier import Fourier
    from vitclinic.probes.features.hsic import mini_batch_cka
    from vitclinic.probes.features.knn import KNN
    from vitclinic.probes.features.lesion import Lesion
    from vitclinic.probes.features.linear_probe import LinearProbe
    from vitclinic.probes.features.retrieval import Retrieval
    from vitclinic.probes.features.sparsity import Sparsity
    from vitclinic.probes.features.token_norms import TokenNorms
    from vitclinic.probes.features.token_similarity import TokenSimilarity
    from vitclinic.probes.features.variance import Variance
    from vitclinic.probes.guards import preserve_state
    from vitclinic.probes.loading import find_normalization, load_subject
    from vitclinic.probes.norms import Norms
    from vitclinic.probes.past_training import PastWeights, Training
    from vitclinic.probes.probe import (
        DoesNotApply,
        Need,
        OwningProbe,
        Probe,
        Result,
        StreamingProbe,
        Tally,
        mean_scalar,
        register,
        unit_row,
    )
    from vitclinic.probes.running import describe_conditions, find_obstacle, measure, view_of
    from vitclinic.probes.selection import default_probes, known_probes, parse_probes
    from vitclinic.probes.subject import Subject

__all__ = [
    "CKA",
    "FGSM",
    "KNN",
    "NTK",
    "PGD",
    "Accuracy",
    "AlignmentUniformity",
    "AnatomyProbe",
    "AttentionDistance",
    "AttentionEntropy",
    "AttentionMaps",
    "CBScale",
    "Corruptions",
    "Cost",
    "DetectionPrecision",
    "DoesNotApply",
    "EmbeddingMap",
    "Errors",
    "FigureSpec",
    "Flatness",
    "Fourier",
    "FrequencyNoise",
    "HessianSpectrum",
    "LabelErrors",
    "Landscape",
    "Lesion",
    "LinearProbe",
    "MaskNoise",
    "Measurement",
    "MissingRate",
    "Need",
    "Norms",
    "Occlusion",
    "OwningProbe",
    "PastWeights",
    "Probe",
    "ProbeCollection",
    "ProbeFacts",
    "Result",
    "Retrieval",
    "RunningMean",
    "Saliency",
    "Scalar",
    "SegmentationAccuracy",
    "ShapeBias",
    "Sharpness",
    "Shift",
    "Slices",
    "SoftmaxJacobian",
    "Sparsity",
    "StreamingProbe",
    "Subject",
    "Tally",
    "TokenKindsProbe",
    "TokenNorms",
    "TokenSimilarity",
    "TrainNLL",
    "Training",
    "Trajectory",
    "Variance",
    "VqaAccuracy",
    "block_structure",
    "cka_between",
    "default_probes",
    "describe_conditions",
    "find_normalization",
    "find_obstacle",
    "known_probes",
    "load_subject",
    "mean_scalar",
    "measure",
    "mini_batch_cka",
    "parameters_by_unit",
    "parse_probes",
    "preserve_state",
    "register",
    "unit_row",
    "view_of",
]

make_lazy(__name__)
