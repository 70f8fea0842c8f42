"""Attention between words and patches, and how alike tokens of a kind are, layer by layer.

Shapes: P pairs of an image and a question, H heads, N tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitclinic._core.records import UnitRow
from vitclinic._core.registry import KeyScalars
from vitclinic._core.statistics import RunningMean
from vitclinic.anatomy import AttentionMap, Unit, record_attention, stream
from vitclinic.models.tokens import TokenKinds, passing_tokens
from vitclinic.probes.attention.entropy import row_entropy
from vitclinic.probes.attention.tally import attention_units
from vitclinic.probes.probe import DoesNotApply, Need, OwningProbe, Result, mean_scalar, register, unit_row
from vitclinic.probes.questions import ask_questions, count_questions, find_answerer
from vitclinic.probes.subject import Subject

KINDS = ("text", "image")
Values = NDArray[np.float64]


def attention_mass(weights_phnn: Tensor, kinds: TokenKinds) -> dict[str, Tensor]:
    """Return the attention from tokens of each kind to those of each kind, [P]: means over queries and heads.

    Rows of attention sum to 1, so that `text_to_text` + `text_to_image` = 1.
    """
    found = {}
    mean_pnn = weights_phnn.double().mean(1)
    for query in KINDS:
        rows_pn = kinds.of(query).double()
        for key in KINDS:
            mass_pn = (mean_pnn * kinds.of(key)[:, None]).sum(-1)
            found[f"{query}_to_{key}"] = (mass_pn * rows_pn).sum(1) / rows_pn.sum(1)
    return found


def kind_entropy(weights_phnn: Tensor, kinds: TokenKinds) -> dict[str, Tensor]:
    """Return the entropy of the rows of each kind of query relative to that of uniform attention, [P]."""
    entropy_pn = row_entropy(weights_phnn).double().mean(1)
    visible_p = kinds.of("all").sum(1).double()
    found = {}
    for query in KINDS:
        rows_pn = kinds.of(query).double()
        found[f"{query}_entropy"] = (entropy_pn * rows_pn).sum(1) / rows_pn.sum(1) / visible_p.log()
    return found


def kind_similarity(x_pnd: Tensor, kinds: TokenKinds) -> dict[str, Tensor]:
    """Return the mean cosine of two different tokens of a kind, [P]; 1 where there is only one."""
    unit_pnd = torch.nn.functional.normalize(x_pnd.double(), dim=-1)
    found = {}
    for kind in KINDS:
        rows_pn = kinds.of(kind).double()
        count_p = rows_pn.sum(1)
        total_p = (unit_pnd * rows_pn[:, :, None]).sum(1).square().sum(1)
        pairs_p = (count_p * (count_p - 1)).clamp_min(1)
        found[f"{kind}_similarity"] = torch.where(count_p > 1, (total_p - count_p) / pairs_p, torch.ones_like(count_p))
    return found


@register
class TokenKindsProbe(OwningProbe):
    """Attention from words and patches to words and patches, its entropy, and the similarity of tokens of a kind.

    Asked are all questions about each image; words that fill a question up take no part.
    """

    name = "token_kinds"
    group = "Attention"
    rank = 85
    title = "Words and patches"
    question = "Do words look at patches, and patches at words?"
    paper = "Hyeon-Woo et al. 2023, Sec. 4.7"
    key_scalars: ClassVar[KeyScalars] = {
        "text_to_image": None,
        "image_to_text": None,
        "text_entropy": None,
        "image_entropy": None,
    }
    needs: ClassVar[frozenset[Need]] = frozenset({"attention"})

    def check(self, subject: Subject) -> None:
        find_answerer(subject)

    def forwards(self, subject: Subject) -> float:
        return 2.0 * count_questions(subject)

    def measure(self, subject: Subject) -> Result:
        find_answerer(subject)
        units = attention_units(subject.anatomy)
        states = {unit.name: unit for unit in subject.anatomy.units if unit.kind in ("msa", "mlp")}
        seen = _Seen()
        with (
            record_attention(units, seen.read_map),
            stream({name: unit.output for name, unit in states.items()}, seen.read_state),
        ):
            for batch, _, rows, _ in ask_questions(subject):
                seen.take_in(rows, len(batch))
        layers = [_row(unit, seen.layers[name]) for name, unit in states.items() if name in seen.layers]
        scalars = {name: mean_scalar(running) for name, running in seen.means().items()}
        return Result({**scalars, "text_share": mean_scalar(seen.share)}, layers)


def _row(unit: Unit, values: Mapping[str, RunningMean]) -> UnitRow:
    return unit_row(unit, **{name: mean_scalar(running) for name, running in values.items()})


class _Seen:
    """Running means over images of each layer, each image being the mean over its questions."""

    def __init__(self) -> None:
        self.layers: dict[str, dict[str, RunningMean]] = defaultdict(lambda: defaultdict(RunningMean))
        self.share = RunningMean()
        self._of_all: dict[str, RunningMean] = defaultdict(RunningMean)
        self._passing: dict[str, dict[str, Values]] = {}
        self._kinds: TokenKinds | None = None

    def read_map(self, seen: AttentionMap) -> None:
        kinds = self._look()
        found = attention_mass(seen.weights, kinds) | kind_entropy(seen.weights, kinds)
        self._keep(seen.unit.name, found)

    def read_state(self, name: str, x_pnd: Tensor) -> None:
        self._keep(name, kind_similarity(x_pnd, self._look()))

    def take_in(self, rows: NDArray[np.int64], images: int) -> None:
        """Add what has passed of a batch."""
        assert self._kinds is not None
        counts = np.bincount(rows, minlength=images)
        totals: dict[str, list[Values]] = defaultdict(list)
        for unit, values in self._passing.items():
            for name, of_pairs in values.items():
                of_images = np.bincount(rows, weights=of_pairs, minlength=images) / counts
                self.layers[unit][name].add(of_images)
                totals[name].append(of_images)
        for name, parts in totals.items():
            self._of_all[name].add(np.mean(parts, axis=0))
        share = self._kinds.of("text").sum(1) / self._kinds.of("all").sum(1)
        self.share.add(np.bincount(rows, weights=share.double().cpu().numpy(), minlength=images) / counts)
        self._passing = {}

    def means(self) -> dict[str, RunningMean]:
        """Return the means over layers."""
        return dict(self._of_all)

    def _keep(self, unit: str, found: Mapping[str, Tensor]) -> None:
        values = self._passing.setdefault(unit, {})
        values.update({name: value.cpu().numpy() for name, value in found.items()})

    def _look(self) -> TokenKinds:
        kinds = passing_tokens()
        if kinds is None:
            raise DoesNotApply("the network takes images alone; questions are for runs of the task vqa.")
        self._kinds = kinds
        return kinds
