"""How dense attention is, layer by layer, against uniform attention [hyeonwoo2023 Fig. 4, 7a]."""

from __future__ import annotations

from collections.abc import Sequence

from vitclinic.reports.contents import Examined
from vitclinic.reports.figure import Figure, draws
from vitclinic.reports.figures.depth import overlaid
from vitclinic.reports.figures.drawing import GREY
from vitclinic.reports.figures.heads import head_marks
from vitclinic.reports.figures.units import series, unit_table


@draws("attention_entropy")
def attention_entropy(examined: Sequence[Examined]) -> list[Figure]:
    return [*_against_maximum(examined), *_of_class_token(examined)]


def _against_maximum(examined: Sequence[Examined]) -> list[Figure]:
    found = series(examined, "attention_entropy", "ratio")
    if not found:
        return []
    plot = overlaid({"entropy / maximum": found}, "attention layer")
    plot.add_traces(head_marks(found, "head_entropy", divisor="maximum"))
    line = {"color": GREY, "width": 1.5, "dash": "dot"}
    plot.add_hline(y=1, line=line, annotation={"text": "uniform attention", "yanchor": "bottom", "font": {"size": 11}})
    return [
        Figure(
            name="attention-entropy-layers",
            title="Entropy of attention by layer",
            reading="Each point is the mean entropy of a layer's attention, divided by that of uniform attention over"
            " the same keys; small dashes are its heads. Hyeonwoo et al. found learned attention close to the"
            " maximum, which is attention that merely averages.",
            paper="Hyeonwoo et al. 2023, Fig. 4 (H1)",
            table=unit_table(
                examined, "attention_entropy", ["ratio", "entropy", "upper", "maximum"], heads="head_entropy"
            ),
            plot=plot,
        )
    ]


def _of_class_token(examined: Sequence[Examined]) -> list[Figure]:
    found = series(examined, "attention_entropy", "class_entropy")
    if not found:
        return []
    return [
        Figure(
            name="attention-entropy-class",
            title="Entropy of the class token's attention",
            reading="Each point is the entropy of the class token's attention in one layer, mean over heads and"
            " images: the lower, the fewer patches it looks at. Hyeonwoo et al. found that Context Broadcasting"
            " lowers it, most in deep layers.",
            paper="Hyeonwoo et al. 2023, Fig. 7a (H2)",
            table=unit_table(examined, "attention_entropy", ["class_entropy", "patch_entropy"]),
            plot=overlaid({"entropy (nats)": found}, "attention layer"),
        )
    ]
