"""What a probe says about itself, and how it travels with a measurement."""

import json

import pytest

from tests.probes.subjects import subject
from vitclinic._core.errors import RecipeError
from vitclinic._core.records import Measurement
from vitclinic._core.registry import LAST, OTHER, FigureSpec, ProbeFacts
from vitclinic.exam.store import read_measurement
from vitclinic.probes import OwningProbe, known_probes, measure, parse_probes
from vitclinic.reports.summary import GROUPS

OURS = {name: probe for name, probe in known_probes().items() if probe.__module__.startswith("vitclinic.")}

ORDER = [
    *("anatomy", "vqa", "accuracy", "errors", "cost", "slices", "norms", "label_errors"),
    *("fourier", "segmentation", "variance", "detection", "cka", "embedding_map", "token_similarity", "token_norms"),
    *("sparsity", "token_kinds"),
    *("attention_entropy", "softmax_jacobian", "attention_distance", "attention_maps", "cb_scale", "trajectory"),
    *(
        "hessian_spectrum",
        "sharpness",
        "train_nll",
        "corruptions",
        "mask_noise",
        "landscape",
        "lesion",
        "frequency_noise",
    ),
    *("saliency", "shape_bias", "flatness", "fgsm", "occlusion", "missing_rate", "pgd", "ntk", "shift"),
    *("knn", "retrieval", "alignment_uniformity", "linear_probe"),
]


@pytest.mark.parametrize("name", OURS)
def test_every_probe_of_ours_says_all_of_itself(name):
    facts = OURS[name].facts()
    assert facts.title not in ("", name)
    assert facts.question.endswith("?")
    assert facts.group in GROUPS
    assert facts.paper or name == "anatomy"  # which is in no paper
    assert facts.key_scalars
    assert facts.rank % 5 == 0


def test_ranks_are_the_order_of_plans():
    assert sorted(OURS, key=lambda name: OURS[name].rank) == ORDER
    assert len({probe.rank for probe in OURS.values()}) == len(OURS)
    assert [name for name, probe in OURS.items() if probe.asked_for] == [
        "alignment_uniformity",
        "knn",
        "linear_probe",
        "retrieval",
        "shift",
    ]


def test_a_probe_that_says_nothing_comes_last_under_its_name():
    class Silent(OwningProbe):
        """The first line.

        And more.
        """

        name = "silent"

    assert Silent.facts() == ProbeFacts(title="silent", question="The first line.", group=OTHER, rank=LAST)
    assert all(probe.rank < LAST for probe in OURS.values())


def test_a_mistake_in_the_facts_shows_where_the_probe_is_defined():
    with pytest.raises(RecipeError, match=r"Wrong\.key_scalars\.x.*'higher', 'lower' or 'nearer to 0'"):

        class Wrong(OwningProbe):
            name = "wrong"
            key_scalars = {"x": "more"}  # noqa: RUF012


def test_facts_travel_in_the_json(tmp_path):
    (measured,) = measure(subject("vit"), parse_probes(["norms"]))
    measured.write(tmp_path / "norms.json")
    stored = json.loads((tmp_path / "norms.json").read_text())
    assert stored["facts"]["title"] == "Norms"
    assert list(stored["facts"]["key_scalars"]) == ["weight_norm", "activation_norm_last"]
    assert Measurement.read(tmp_path / "norms.json").facts == OURS["norms"].facts()


def test_a_measurement_of_0_1_has_the_facts_of_the_probe_of_its_name(tmp_path):
    (measured,) = measure(subject("vit"), parse_probes(["norms"]))
    old = measured.model_copy(update={"facts": None})
    old.write(tmp_path / "norms.json")
    record = json.loads((tmp_path / "norms.json").read_text())
    del record["facts"], record["digest"]  # 0.1 wrote neither
    record["schema"] = 1
    (tmp_path / "norms.json").write_text(json.dumps(record))
    assert Measurement.read(tmp_path / "norms.json") == old
    assert read_measurement(tmp_path / "norms.json") == measured
    assert old.terms == measured.terms
    (tmp_path / "norms.json").write_text(json.dumps({**record, "probe": "of a package that is gone"}))
    assert read_measurement(tmp_path / "norms.json").facts is None


def test_a_declared_figure_travels_too(tmp_path):
    spec = FigureSpec(name="x", kind="scalars", values={"a": "A"}, title="T", reading="R.")

    class Drawn(OwningProbe):
        """Drawn."""

        name = "drawn"
        figures = (spec,)

    (measured,) = measure(subject("vit"), parse_probes(["norms"]))
    measured.model_copy(update={"facts": Drawn.facts()}).write(tmp_path / "drawn.json")
    found = Measurement.read(tmp_path / "drawn.json").facts
    assert found is not None
    assert found.figures == [spec]
