import pickle

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from vitclinic._core.errors import RecipeError
from vitclinic._core.time import seconds
from vitclinic.training import Recipe, build_recipe, read_shipped_recipes
from vitclinic.treatments import Treatment, parse_treatments


def test_a_bare_value_sets_a_section_s_main_key_also_beside_other_keys():
    recipe = build_recipe(None, ["data.limit=7", "data=digits", "model=resnet18", "optimizer=sgd", "data.augment=deit"])
    assert (recipe.data.source, recipe.data.limit, recipe.model.name) == ("digits", 7, "resnet18")
    assert (recipe.optimizer.name, recipe.data.augment.level) == ("sgd", "deit")


def test_another_network_does_not_take_the_keywords_of_the_recipes_own():
    keywords = build_recipe("digits").model.model_extra
    assert keywords["patch_size"] == 2
    assert build_recipe("digits", ["model=resnet18"]).model.model_extra == {}
    assert build_recipe("digits", ["model=alternet18", "model.stem=cifar"]).model.model_extra == {"stem": "cifar"}
    assert build_recipe("digits", ["model=vit_tiny_fitted"]).model.model_extra == keywords
    assert build_recipe("digits", ["model.depth=2"]).model.model_extra == {**keywords, "depth": 2}


def test_values_are_yaml():
    recipe = build_recipe(None, ["optimizer.lr=3e-4", "checkpoint.keep_epochs=[0, 5]", "clip=null", "compile=true"])
    assert recipe.optimizer.lr == 3e-4
    assert recipe.checkpoint.keep_epochs == [0, 5]
    assert recipe.clip is None
    assert recipe.compile is True


def test_model_keywords_are_open_and_kept():
    recipe = build_recipe({"model": "resnet18"}, ["model.channels=[4, 4, 8, 8]", "model.drop_rate=0.1"])
    assert recipe.model.keywords == {"channels": [4, 4, 8, 8], "drop_rate": 0.1}


def test_words_win_over_the_file_also_for_the_length(tmp_path):
    (tmp_path / "r.yaml").write_text("epochs: 5\nseed: 3\noptimizer: {lr: 1e-3, weight_decay: 0.3}\n")
    recipe = build_recipe(tmp_path / "r.yaml", ["steps=7", "optimizer.lr=0.5"])
    assert (recipe.epochs, recipe.steps, recipe.seed) == (None, 7, 3)
    assert (recipe.optimizer.lr, recipe.optimizer.weight_decay) == (0.5, 0.3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["optimzer.lr=1"], r"Unknown key 'optimzer'. Did you mean 'optimizer'\?"),
        (["data.limt=1"], r"Unknown key 'data.limt'. Did you mean 'limit'\?"),
        (["data.augment.mixp=1"], r"Unknown key 'data.augment.mixp'. Did you mean 'mixup'\?"),
        (["qqq=1"], r"Unknown key 'qqq'. Known here: model, init, data"),
        (["optimizer.lr=fast"], r"'optimizer.lr': .*valid number \(got 'fast'\)"),
        (["data.augment=strong"], r"'data.augment.level': .*'none', 'light' or 'deit'"),
        (["epochs=3", "steps=4"], "one of epochs, steps, max_time"),
        (["data.limit=3", "data.fraction=0.5"], "limit or fraction"),
        (["batch_size=10", "accumulate=3"], "not a multiple"),
        (["max_time=soon"], "such as 90s"),
        (["model.img_size=[32]"], "img_size"),
        (["data.augment.randaugment=strong"], "randaugment"),
        (["schedule.warmup=long"], "'500 steps'"),
        (["epochs"], "not of the form key=value"),
        (["model={"], "not YAML"),
        (["treatments=[aspirin]", "seed=x"], "seed"),
        (["epochs="], "'epochs=' has no value"),
        (["max_time= "], "has no value"),
        (["data.limit="], "has no value"),
        (["epochs=.inf"], "'epochs': .*finite"),
        (["epochs=1e9"], "'epochs': .*less than or equal"),
        (["optimizer.lr=0"], "'optimizer.lr': .*greater than 0"),
        (["optimizer.lr=.inf"], "'optimizer.lr': .*finite"),
        (["optimizer.lr=.nan"], "'optimizer.lr': .*finite"),
        (["clip=.inf"], "'clip': .*finite"),
        (["seed=-1"], "'seed': .*greater than or equal to 0"),
        (["data.split_seed=-1"], "'data.split_seed': .*greater than or equal to 0"),
        (["schedule.warmup=200%"], "'schedule.warmup': a run has no more than 100%"),
        (["checkpoint.keep_epochs=[-1]"], "keep_epochs"),
        (["checkpoint.every=0"], "'checkpoint.every': write '1 steps' for after every step"),
        (["validation=0%"], "'validation.every': .*or '100%' for at the end alone"),
        (["logging.trajectory=99999999"], "'logging.trajectory': .*less than or equal to 1000000"),
        (["model.drop_path_rate=.nan"], "'model': 'drop_path_rate' must be a finite number"),
        (["model.drop_path_rate=-1"], "'drop_path_rate' is a share, from 0 to below 1"),
        (["model.drop_rate=1"], "'drop_rate' is a share"),
        (["model.depth=0"], "'depth' must be at least 1"),
        (["model.checkpoint_path=/etc/passwd"], "'checkpoint_path' is no keyword of a network: write init=FILE"),
        (["model.pretrained_cfg={file: x}"], "'pretrained_cfg' is no keyword of a network"),
        (["model=hybrid_vit", "model.depth=-1"], "'depth' must be at least 0"),
        (["model.patch_size=0"], "'patch_size' must be at least 1"),
        (["batch_size=99999999"], "'batch_size': .*less than or equal"),
        (["data.augment.repeats=1000000000000000000000"], "'data.augment.repeats': .*less than or equal to 1000"),
        (["workers=100000"], "'workers': .*less than or equal"),
        (["out=''"], "'out': .*at least 1 character"),
        (["data=''"], "'data.source': .*at least 1 character"),
        (["Data=digits"], r"Unknown key 'Data'. Did you mean 'data'\?"),
        (["LR=0.1"], r"Unknown key 'LR'. Did you mean 'optimizer.lr'\?"),
        (["augment=deit"], r"Unknown key 'augment'. Did you mean 'data.augment'\?"),
        (["weight_decay=0.1"], r"Unknown key 'weight_decay'. Did you mean 'optimizer.weight_decay'\?"),
        (["name=sgd"], r"Unknown key 'name'. Did you mean 'model.name' or .*'optimizer.name'"),
        (["optimizer.LR=0.1"], r"Unknown key 'optimizer.LR'. Did you mean 'lr'\?"),
        (["data.Augment=none"], r"Unknown key 'data.Augment'. Did you mean 'augment'\?"),
        (["treatments=[{sam: {Rho: 0.1}}]"], r"[Rr]ho"),
        (["seed=" + "9" * 5000], "not YAML"),
        (["seed=2024-13-45"], "not YAML"),
        (["seed=&a [*a]"], "refers to itself"),
        (["seed=" + "[" * 2000 + "]" * 2000], "nested too deeply"),
        (["seed=" + "[" * 100 + "]" * 100], "nested too deeply"),
        (["seed=\0"], "not YAML"),
    ],
)
def test_mistakes_are_sentences(words, message):
    with pytest.raises(RecipeError, match=message):
        build_recipe(None, words)


_BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("data: digits # \xe9".encode("latin-1"), "not UTF-8"),
        ("data: digits".encode("utf-16"), "not UTF-8"),
        (bytes(range(256)), "not UTF-8"),
        (b"data: dig\0its", "not YAML"),
        (b"seed: &a {b: *a}", "refers to itself"),
        (_BOMB.encode(), "stands for more than 100,000 values"),
        (b"seed: " + b"9" * 5000, "not YAML"),
        (b"[1, 2]", "holds a list"),
        (b"x" * (2**24 + 1), "more than 16 MB"),
    ],
)
def test_a_recipe_file_that_cannot_be_one(tmp_path, content, message):
    (tmp_path / "r.yaml").write_bytes(content)
    with pytest.raises(RecipeError, match=message):
        build_recipe(tmp_path / "r.yaml")


@pytest.mark.parametrize("base", ["x" * 5000, "~nobody-of-this-name/r.yaml", "a\0b", "/dev/zero", "/dev/null/r"])
def test_a_recipe_path_that_cannot_be_one(base):
    with pytest.raises(RecipeError, match=r"a recipe|no recipe|regular file|no such user"):
        build_recipe(base)


def test_an_attention_free_hybrid_is_a_network():
    assert build_recipe(None, ["model=hybrid_vit", "model.depth=0"]).model.keywords == {"depth": 0}


def test_a_file_with_a_byte_order_mark_is_read(tmp_path):
    (tmp_path / "r.yaml").write_bytes("data: digits".encode("utf-8-sig"))
    assert build_recipe(tmp_path / "r.yaml").data.source == "digits"


def test_an_unknown_recipe_suggests_one():
    with pytest.raises(RecipeError, match="Did you mean 'digits'"):
        build_recipe("digit")


def test_nothing_is_constructed_from_yaml():
    with pytest.raises(RecipeError, match="not YAML"):
        build_recipe(None, ["seed=!!python/object/apply:os.getcwd []"])


@pytest.mark.parametrize("name", read_shipped_recipes())
def test_shipped_recipes_are_valid_and_tell_their_command_time_and_score(name):
    from vitclinic.cli.list import recipe_header

    header = recipe_header(read_shipped_recipes()[name])
    assert header["command"].startswith(f"vitclinic train {name}")
    assert all(header.values())
    build_recipe(name)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "seed": st.integers(0, 9),
            "epochs": st.integers(1, 9),
            "ema": st.floats(0.1, 0.9),
            "model": st.just("resnet18") | st.just({"name": "resnet18", "drop_rate": 0.5}),
            "optimizer": st.builds(lambda lr: {"lr": lr}, st.floats(1e-6, 1)),
            "data": st.just("digits") | st.just({"source": "digits", "augment": {"level": "deit", "mixup": 0.3}}),
            "treatments": st.just([{"sam": {"rho": 0.1}}]),
        },
    )
)
def test_a_stored_recipe_reads_back_equal(plain):
    recipe = build_recipe(plain)
    again = Recipe.model_validate(yaml.safe_load(yaml.safe_dump(recipe.plain())) or {})
    assert again == recipe
    assert again.digest("d") == recipe.digest("d")


def test_the_digest_covers_what_changes_the_numbers_and_nothing_else():
    base = build_recipe({"data": "digits"}).digest("data")
    for same in ["out=x", "workers=3", "device=cpu", "logging.every=5", "seed=0", "optimizer.lr=1e-3"]:
        assert build_recipe({"data": "digits"}, [same]).digest("data") == base, same
    for other in [
        "seed=1",
        "optimizer.lr=2e-3",
        "model.depth=3",
        "data.limit=5",
        "treatments=[sam]",
        "precision=bf16",
    ]:
        assert build_recipe({"data": "digits"}, [other]).digest("data") != base, other
    assert build_recipe({"data": "digits"}).digest("other data") != base


def test_the_digest_of_the_default_recipe_is_stable():
    """Changing it orphans every stored run: do so only with a new schema version, and then write it anew here."""
    assert build_recipe(None).digest("data")[:16] == "d2cc03d74798c761"


def test_times():
    assert seconds("1h 2m 3s") == 3723
    for wrong in ["", "h", "3x", "-5"]:
        with pytest.raises(ValueError, match="such as"):
            seconds(wrong)


@pytest.mark.parametrize("written", ["sam", "{sam: {rho: 0.1}}", "[{sam: 0.1}]", "[3]", "null"])
def test_treatments_that_are_no_list_of_names_and_options_say_what_to_write(written):
    with pytest.raises(
        RecipeError, match=r"^'treatments': write a list, as in \[sam\] or \[\{sam: \{rho: 0.1\}\}\] \(got"
    ):
        build_recipe(None, [f"treatments={written}"])


@pytest.mark.parametrize(
    ("written", "digest"),
    [
        (["sam"], "5f10da54587753bc"),
        ([{"sam": {}}], "6b99656163350bdc"),
        ([{"sam": None}], "efb0a99941f12808"),
        ([{"sam": {"rho": 1}}], "97f0f5181d441e0c"),
        (["conv_stem", {"sam": {"rho": 0.1}}], "4cf653d86d680a63"),
    ],
)
def test_treatments_are_parsed_and_stored_as_they_were_written(written, digest):
    """The digests are those of 0.1: another spelling of the same treatment would orphan stored runs."""
    recipe = build_recipe({"treatments": written})
    assert all(isinstance(treatment, Treatment) for treatment in recipe.treatments)
    assert recipe.plain()["treatments"] == recipe.model_dump(mode="json")["treatments"] == written
    assert recipe.digest("data")[:16] == digest
    assert pickle.loads(pickle.dumps(recipe)).digest("data")[:16] == digest  # noqa: S301  (our own, from a line above)


def test_treatments_are_written_by_what_was_set_of_them():
    recipe = build_recipe(
        {"treatments": [parse_treatments(["conv_stem"])[0], *parse_treatments([{"sam": {"rho": 1}}])]}
    )
    assert recipe.plain()["treatments"] == ["conv_stem", {"sam": {"rho": 1.0}}]
    assert recipe.add_treatments([{"gap_head": None}]).plain()["treatments"][2:] == [{"gap_head": None}]


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (["smm"], r"^There is no treatment 'smm'. Did you mean 'sam'\?$"),
        ([{"sam": {"roh": 1}}], r"^Unknown key 'treatments.sam.roh'. Did you mean 'rho'\?$"),
        ([{"sam": {"rho": "x"}}], r"^'treatments.sam.rho': input should be a valid number \(got 'x'\).$"),
        (["sam", "sam"], r"^'treatments': 'sam' is listed twice.$"),
    ],
)
def test_a_mistake_in_a_treatment_is_found_with_the_recipe(written, message):
    with pytest.raises(RecipeError, match=message):
        build_recipe({"treatments": written})


def test_a_long_value_is_cut_in_a_message():
    with pytest.raises(RecipeError, match=r"^'data.source': .* \(got \[\[0, 1, .* \.\.\.\)\.$") as told:
        build_recipe({"data": [list(range(10_000))]})
    assert len(str(told.value)) < 300
    assert "\n" not in str(told.value)
