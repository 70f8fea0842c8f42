import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vitclinic._core.errors import DataError
from vitclinic.data.source import assign, assign_values, stratify, subset, training_count

labels_strategy = st.lists(st.integers(0, 4), min_size=1, max_size=200).map(lambda x: np.array(x, dtype=np.int64))


@given(labels_strategy, st.integers(0, 100))
def test_the_order_is_a_permutation_and_repeats(labels, seed):
    order = stratify(labels, seed)
    assert sorted(order) == list(range(len(labels)))
    assert np.array_equal(order, stratify(labels, seed))


@given(labels_strategy, st.integers(0, 100), st.floats(0, 1))
def test_every_prefix_has_the_classes_in_their_proportions(labels, seed, share):
    count = round(share * len(labels))
    prefix = np.bincount(labels[stratify(labels, seed)[:count]], minlength=5)
    wanted = np.bincount(labels, minlength=5) * (count / len(labels))
    assert np.abs(prefix - wanted).max() <= 5 / 2 + 1  # one rank of each class can lie on the border


@given(labels_strategy, st.integers(0, 100))
def test_held_out_splits_are_disjoint_and_lose_nothing(labels, seed):
    splits = assign({"train": labels}, seed)
    rows = np.concatenate([indices for _, indices in splits.values()])
    assert sorted(rows) == list(range(len(labels)))
    assert len(splits["train"][1]) >= 1


@given(labels_strategy, st.sets(st.sampled_from(["val", "test"])), st.sampled_from([0.0, 0.1, 0.3]))
def test_how_many_stay_for_training_is_known_beforehand(labels, beside, share):
    splits = assign({"train": labels, **dict.fromkeys(beside, labels)}, 0, share)
    assert training_count(len(labels), beside, share) == len(splits["train"][1])


@given(labels_strategy, st.sets(st.sampled_from(["val", "test"])))
def test_all_images_are_trained_on_if_none_are_held_out(labels, beside):
    splits = assign({"train": labels, **dict.fromkeys(beside, labels)}, 0, share=0.0)
    assert splits["train"][0] == "train"
    assert splits["train"][1].tolist() == list(range(len(labels)))
    assert len(splits["val"][1]) == (len(labels) if "val" in beside else 0)
    assert len(splits["test"][1]) == (len(labels) if beside else 0)


def test_imagenet_is_trained_on_all_its_images_and_scored_on_its_public_validation_set():
    """It has train and val, and no test: a tenth of train used to be scored, which no paper does."""
    train, val = np.zeros(50, dtype=np.int64), np.zeros(7, dtype=np.int64)
    splits = assign({"train": train, "val": val}, 0, share=0.0)
    assert len(splits["train"][1]) == 50
    assert (splits["test"][0], splits["test"][1].tolist()) == ("val", list(range(7)))
    assert assign({"train": train, "val": val}, 0)["test"][0] == "train"  # held out, unless all are to be trained on


def test_a_balanced_set_is_split_exactly():
    labels = np.repeat(np.arange(10), 100)
    splits = assign({"train": labels}, 0)
    for split, size in {"train": 80, "val": 10, "test": 10}.items():
        assert np.bincount(labels[splits[split][1]]).tolist() == [size] * 10


def test_splits_of_the_source_are_kept():
    train, test = np.zeros(50, dtype=np.int64), np.zeros(7, dtype=np.int64)
    splits = assign({"train": train, "test": test}, 0)
    assert splits["test"][0] == "test"
    assert splits["test"][1].tolist() == list(range(7))
    assert splits["val"][0] == "train"
    assert len(splits["val"][1]) == 5


def test_subsets_are_nested():
    labels = np.random.default_rng(0).integers(0, 7, 500)
    small, large = subset(labels, 50, 3), subset(labels, 120, 3)
    assert set(small) < set(large)
    assert not np.array_equal(small, subset(labels, 50, 4))


def test_a_rare_class_stays_in_training():
    labels = np.array([0] * 99 + [1])
    assert 99 in assign({"train": labels}, 0)["train"][1]


@given(st.lists(st.integers(0, 6), min_size=10, max_size=200).map(np.array), st.integers(0, 100))
def test_whole_values_of_a_column_are_held_out(values, seed):
    labels = {"train": np.zeros(len(values), dtype=np.int64)}
    try:
        splits = assign_values(labels, values, seed)
    except DataError as error:
        assert "too few values" in str(error)  # noqa: PT017 (either is right, depending on the draw)
        return
    held = {split: set(values[rows]) for split, (_, rows) in splits.items()}
    assert not held["train"] & (held["val"] | held["test"])
    assert not held["val"] & held["test"]
    assert held["train"] | held["val"] | held["test"] == set(values)
    assert all(len(splits[split][1]) >= 0.1 * len(values) for split in ("val", "test"))
