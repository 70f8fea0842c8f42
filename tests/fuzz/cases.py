"""Cases by kind: each makes one fault in a fresh copy of the world, runs one command and says what broke."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.fuzz.damage import STRANGE, damage, edit_json
from tests.fuzz.holding import Ended, find_losses, photograph, run_command
from tests.fuzz.world import final_weights
from vitclinic._core.config import section
from vitclinic._core.errors import RecipeError
from vitclinic.training import build_recipe
from vitclinic.training.recipe import Recipe

NOBODY = 65534


@dataclass
class Place:
    """A fresh copy of the world in which one case happens."""

    folder: Path
    scratch: Path
    world: Path
    before: dict[str, str]
    """Digests of its files."""
    done: str = ""
    """What was damaged, and how."""

    def run(self, *words: str) -> Ended:
        """Run a command here."""
        ended = run_command(words, self.scratch)
        ended.damage = self.done
        return ended

    def damage(self, file: str, draw: random.Random) -> str:
        """Damage a file and return its name."""
        self.done = f"{file}: {damage(self.folder / file, draw)}"
        return file

    def damage_one(self, part: str, draw: random.Random) -> str:
        """Damage a file below a folder and return its name."""
        files = [path for path in sorted((self.folder / part).rglob("*")) if path.is_file()]
        return self.damage(str(draw.choice(files).relative_to(self.folder)), draw)

    def check(self, ended: Ended, may_change: Callable[[str], bool]) -> Ended:
        """Add what was lost of files that a command had no business with."""
        ended.faults += find_losses(self.before, photograph(self.folder), may_change)
        return ended


WRITTEN = ("run/exams/", "run/report", "run/calib", "run/export")
"""What commands add to a run that is there."""

Kind = Callable[[Place, random.Random], Ended]


def _keys(config: Any = Recipe, prefix: str = "") -> Iterator[str]:
    for name in config.model_fields:
        yield prefix + name
        inner = section(config, name)
        if inner is not None:
            yield from _keys(inner, f"{prefix}{name}.")


KEYS = [*_keys(), *(f"model.{key}" for key in ("depth", "embed_dim", "patch_size", "num_heads", "drop_path_rate"))]


PLAUSIBLE = [
    *("0", "1", "2", "3", "-1", "7", "64", "1000", "99999999", "0.1", "0.5", "1.5", "1e-3", "1e9", "true", "false"),
    *(
        "5%",
        "100%",
        "3 steps",
        "2 epochs",
        "10s",
        "1h",
        "[sam]",
        "{sam: {rho: -1}}",
        "[0, 1]",
        "[1, 1, 1]",
        "{}",
        "null",
    ),
    *(
        "digits",
        "auto",
        "none",
        "light",
        "deit",
        "bf16",
        "fp16",
        "fp64",
        "sgd",
        "muon",
        "resnet18",
        "contrastive",
        "cpu",
    ),
]
"""Values that some key takes."""


def _word(draw: random.Random) -> str:
    key = draw.choice(KEYS)
    if draw.random() < 0.05:
        key = draw.choice([key.title(), key[:-1], f"{key}.x", key.replace(".", ".."), "", "."])
    if draw.random() < 0.6:
        return f"{key}={draw.choice(PLAUSIBLE)}"
    value = draw.choice(STRANGE)
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("\n...\n").strip()
    return f"{key}={text}"


def _allowed_word(draw: random.Random) -> str:
    """Return a word that the recipe's types and ranges allow: what is wrong with it shows later, if anything is."""
    for _ in range(50):
        word = _word(draw)
        with suppress(RecipeError):
            build_recipe("recipe.yaml", [word])
            return word
    return "steps=1"


def values(place: Place, draw: random.Random) -> Ended:
    """Give a key of the recipe a strange value."""
    words = [_word(draw) for _ in range(draw.choice([1, 1, 2]))]
    if draw.random() < 0.6:
        words = [_allowed_word(draw)]
    how = ["--dry-run"] if draw.random() < 0.7 else ["steps=1", "out=new"]
    return place.check(place.run("train", "recipe.yaml", *how, *words), lambda name: name.startswith(("new", "cache")))


def run_files(place: Place, draw: random.Random) -> Ended:
    """Damage a file of a finished run, and use the run."""
    file = place.damage_one("run", draw)
    commands = [
        ["predict", "run", "photos/cat"],
        ["predict", "run@last", "photos/cat"],
        ["examine", "run", "--probes", "norms,accuracy", "--device", "cpu"],
        ["report", "run", "--out", "page.html"],
        ["anatomy", "run"],
        ["features", "run", "-o", "new.parquet"],
        ["train", "--resume", "run"],
        ["train", "recipe.yaml", "init=run", "steps=1", "out=new"],
    ]
    words = draw.choice(commands)
    ended = place.check(place.run(*words), lambda name: name == file or name.startswith(("cache", *WRITTEN)))
    if (
        ended.code == 0
        and words[0] == "predict"
        and "WARNING" not in ended.err
        and ended.out != _prediction(place, words)
    ):
        ended.faults.append("wrong without a word")
    return ended


def resumed(place: Place, draw: random.Random) -> Ended:
    """Damage a file of an interrupted run, and resume it: it ends with the same weights, or says why not."""
    file = place.damage_one("stopped", draw)
    ended = place.run("train", "--resume", "stopped")
    place.check(ended, lambda name: name == file or name.startswith(("stopped", "cache")))
    if ended.code == 0:
        if final_weights(place.folder / "stopped") != final_weights(place.world / "whole"):
            ended.faults.append("wrong without a word: other weights")
    elif not ended.faults:
        left = [name for name in ("last", "previous") if (place.folder / "stopped" / "checkpoints" / name).exists()]
        if not left and "checkpoints/" not in file:
            ended.faults.append("loss: no checkpoint is left")
    return ended


def data_files(place: Place, draw: random.Random) -> Ended:
    """Damage an image, a table or the list of classes, and use the data."""
    source = draw.choice(["photos", "photos", "table.parquet"])
    file = place.damage_one(source, draw) if source == "photos" else place.damage(source, draw)
    commands = [
        ["train", "recipe.yaml", f"data={source}", "steps=1", "out=new"],
        ["train", "recipe.yaml", f"data={source}", "data.on_error=skip", "steps=1", "out=new"],
        ["train", "recipe.yaml", f"data={source}", "--dry-run"],
        ["predict", "run", "photos"],
        ["examine", "run", "--data", source, "--probes", "norms", "--device", "cpu"],
        ["corrupt", source, "--out", "copies", "--corruption", "fog", "--severity", "1"],
    ]
    ended = place.run(*draw.choice(commands))
    return place.check(ended, lambda name: name == file or name.startswith(("new", "cache", "copies", *WRITTEN)))


def caches(place: Place, draw: random.Random) -> Ended:
    """Damage a file of the cache: it is built again, and the run is that of undamaged files."""
    place.damage_one("cache", draw)
    shutil.rmtree(place.folder / "whole")
    ended = place.run("train", "recipe.yaml", "out=whole")
    place.check(ended, lambda name: name.startswith(("whole", "cache")))
    if ended.code == 0 and final_weights(place.folder / "whole") != final_weights(place.world / "whole"):
        ended.faults.append("wrong without a word: other weights")
    return ended


def plans(place: Place, draw: random.Random) -> Ended:
    """Damage a recipe or a study file, and use it."""
    name = draw.choice(["recipe.yaml", "study.yaml"])
    place.damage(name, draw)
    words = ["train", name, "--dry-run"] if name == "recipe.yaml" else ["study", name, "--dry-run"]
    return place.check(place.run(*words), lambda file: file == name or file.startswith("cache"))


def weights(place: Place, draw: random.Random) -> Ended:
    """Damage a file of weights, and start from it."""
    file = draw.choice(["weights.safetensors", "weights.pt", "weights.bin"])
    (place.folder / "weights.safetensors").rename(place.folder / file)
    place.damage(file, draw)
    ended = place.run("train", "recipe.yaml", f"init={file}", "steps=1", "out=new")
    return place.check(ended, lambda name: name.startswith(("new", "cache", "weights")))


PATHS = [
    "",
    ".",
    "..",
    "/",
    "run",
    "run@last",
    "run@nothing",
    "run@",
    "@",
    "photos",
    "photos/cat",
    "recipe.yaml",
    "table.parquet",
]
VERBS: dict[str, list[str]] = {
    "train": ["--resume", "--dry-run", "--json", "-q", "out=new", "steps=1", "data=photos"],
    "examine": [
        "--data",
        "--probes",
        "--limit",
        "--seed",
        "--budget",
        "--quick",
        "--device",
        "--out",
        "norms",
        "3s",
        "--json",
    ],
    "predict": ["--top-k", "--temperature", "--size", "--batch-size", "-o", "--json", "--device", "-"],
    "anatomy": ["--json", "--size"],
    "features": ["-o", "--data", "--split", "--limit", "x.parquet", "--device"],
    "report": ["--out", "--title", "--all", "--no-images"],
    "corrupt": ["--out", "--corruption", "--severity", "--limit", "--size", "--seed", "fog", "1", "copies"],
    "export": ["--to", "onnx", "-o", "--json"],
    "study": ["--dry-run", "--seeds", "study.yaml", "--scale", "C6", "--target", "--out"],
    "list": ["probes", "treatments", "datasets", "models", "studies", "--json"],
}


def words(place: Place, draw: random.Random) -> Ended:
    """Type words in any order."""
    verb = draw.choice(list(VERBS))
    texts = [value for value in STRANGE if isinstance(value, str) and "\0" not in value]
    pool = [*VERBS[verb] * 3, *PATHS * 2, *texts, "--nothing", "-1", "1e9", "99999999999999999999"]
    given = [draw.choice(pool) for _ in range(draw.randint(0, 4))]
    if verb in ("study", "train") and "--dry-run" not in given:
        given.append("--dry-run")  # a recipe that can be trained may be trained for long
    ended = place.run(verb, *given)
    return place.check(ended, lambda name: name.startswith(("cache", *WRITTEN)))


def permissions(place: Place, draw: random.Random) -> Ended:
    """Take a right away from an ordinary user."""
    paths = [path for part in ("run", "stopped", "photos", "cache") for path in (place.folder / part).rglob("*")]
    path = draw.choice([*paths, place.folder / "recipe.yaml", place.folder, place.folder / "run"])
    before = stat.S_IMODE(path.stat().st_mode)
    commands = [
        ["train", "recipe.yaml", "steps=1", "out=new"],
        ["train", "--resume", "stopped"],
        ["predict", "run", "photos"],
        ["examine", "run", "--probes", "norms", "--device", "cpu"],
        ["report", "run"],
        ["corrupt", "photos", "--out", "copies", "--corruption", "fog", "--severity", "1"],
    ]
    with _ordinary_user(place):
        mode = draw.choice([0o000, 0o444, 0o500, 0o300, 0o555])
        path.chmod(mode)
        place.done = f"{path.relative_to(place.folder)}: {mode:03o}"
        ended = place.run(*draw.choice(commands))
    path.chmod(before)
    return place.check(
        ended,
        lambda name: name.startswith(("new", "cache", "stopped", "copies", *WRITTEN)),
    )


def is_closed_to_others() -> bool:
    """Return True if only this user can read the packages or this repository, so that nobody else can run anything."""
    places = [Path(sys.prefix), Path(__file__).parent]
    return any(not folder.stat().st_mode & 0o001 for place in places for folder in (place, *place.parents))


@contextmanager
def _ordinary_user(place: Place) -> Iterator[None]:
    """Be nobody; the files of the case are this user's."""
    if os.geteuid() != 0:
        yield
        return
    for folder, _, names in os.walk(place.scratch):
        for path in (folder, *(os.path.join(folder, name) for name in names)):
            os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


def full_disks(place: Place, draw: random.Random) -> Ended:
    """Let files grow to some size only, as a full disk or a quota does."""
    commands = [
        ["train", "recipe.yaml", "out=new"],
        ["train", "--resume", "stopped"],
        ["report", "run"],
        ["examine", "run", "--probes", "cost,anatomy,norms", "--device", "cpu"],
        ["corrupt", "photos", "--out", "copies", "--corruption", "fog", "--severity", "1"],
        ["predict", "run", "photos", "-o", "new.csv"],
        ["features", "run", "-o", "new.parquet"],
    ]
    command = draw.choice(commands)
    if draw.random() < 0.5:
        shutil.rmtree(place.folder / "cache")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(10 ** draw.uniform(0, 5.5)), hard))
    try:
        ended = place.run(*command)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    return place.check(
        ended,
        lambda name: name.startswith(("new", "cache", "stopped", "copies", *WRITTEN)),
    )


VARIABLES = [
    *(
        "VITCLINIC_CACHE",
        "VITCLINIC_CACHE_SIZE",
        "HOME",
        "XDG_CACHE_HOME",
        "COLUMNS",
        "TERM",
        "NO_COLOR",
        "OMP_NUM_THREADS",
    ),
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
]


def environments(place: Place, draw: random.Random) -> Ended:
    """Set a variable of the environment to something strange."""
    texts = [value for value in STRANGE if isinstance(value, str) and "\0" not in value]
    name, value = draw.choice(VARIABLES), draw.choice([*texts, "5G", "1", "2", "0", "run", "photos/cat/00.jpg"])
    commands = [
        ["train", "recipe.yaml", "steps=1", "out=new"],
        ["train", "recipe.yaml", "--dry-run"],
        ["train", "--resume", "stopped"],
        ["predict", "run", "photos"],
        ["examine", "run", "--probes", "norms", "--device", "cpu"],
        ["report", "run"],
        ["corrupt", "photos", "--out", "copies", "--corruption", "fog", "--severity", "1"],
        ["list", "probes"],
        ["doctor"],
    ]
    before = dict(os.environ)
    os.environ[name] = value
    place.done = f"{name}={value}"
    try:
        ended = place.run(*draw.choice(commands))
    finally:
        os.environ.clear()
        os.environ.update(before)
    if name == "RANK":  # only the first of several processes tells
        ended.faults = [fault for fault in ended.faults if fault != "no sentence"]
    return place.check(ended, lambda name: name.startswith(("new", "cache", "stopped", "copies", *WRITTEN)))


def studies(place: Place, draw: random.Random) -> Ended:
    """Damage a result or a run of a study, and go on with it, or make its pages."""
    file = place.damage_one("studies", draw)
    command = draw.choice([["report", "--all"], ["study", "study.yaml"], ["study", "study.yaml", "--json"]])
    ended = place.run(*command)
    return place.check(ended, lambda name: name == file or name.startswith(("studies", "cache")))


def edits(place: Place, draw: random.Random) -> Ended:
    """Edit a JSON file of ours such that it is JSON still, and use it."""
    commands = {
        "studies/*.json": [["report", "--all"], ["study", "study.yaml"]],
        "run/exams/*/*.plan": [["examine", "run", "--probes", "norms", "--budget", "60", "--device", "cpu"]],
        "made/*/corruption.json": [
            ["corrupt", "photos", "--out", "made", "--corruption", "fog", "--severity", "1"],
            ["predict", "run", "photos/cat"],
        ],
        "photos/classes.json": [["train", "recipe.yaml", "--dry-run"]],
        "run/data.json": [["report", "run"], ["train", "--resume", "run"]],
        "cache/surveys/*.json": [["train", "recipe.yaml", "--dry-run"]],
    }
    pattern = draw.choice([pattern for pattern in commands if any(place.folder.glob(pattern))])
    file = draw.choice(sorted(place.folder.glob(pattern)))
    place.done = f"{file.relative_to(place.folder)}: {edit_json(file, draw)}"
    ended = place.run(*draw.choice(commands[pattern]))
    return place.check(
        ended,
        lambda name: name == str(file.relative_to(place.folder)) or name.startswith(("cache", "studies", *WRITTEN)),
    )


def outputs(place: Place, draw: random.Random) -> Ended:
    """Name a device, a pipe, a folder or what no name can be as the file to write; what was there is there still."""
    suffix, *words = draw.choice(
        [
            [".parquet", "features", "run", "-o"],
            [".csv", "predict", "run", "photos/cat", "-o"],
            [".html", "report", "run", "--out"],
            [".html", "examine", "run", "--probes", "norms", "--device", "cpu", "--report"],
            [".xml", *("examine", "run", "--probes", "norms", "--fail-on", "norms.weight_norm<0", "--junit")],
            ["", "corrupt", "photos", "--corruption", "fog", "--severity", "1", "--out"],
            ["", "study", "study.yaml", "--dry-run", "--out"],
            ["", "train", "recipe.yaml", "steps=1", "--dry-run"],
        ]
    )
    path = place.folder / f"target{suffix}"
    kind = draw.choice(["pipe", "device", "full device", "folder", "socket", "broken link", "name"])
    if kind == "pipe":
        os.mkfifo(path)
    elif kind in ("device", "full device"):
        path.symlink_to("/dev/null" if kind == "device" else "/dev/full")
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    elif kind == "broken link":
        path.symlink_to("nowhere/at/all")
    strange = [value for value in STRANGE if isinstance(value, str)]
    name = f"{draw.choice(strange)}{suffix}" if kind == "name" else path.name
    place.done = f"{kind} {name!r}"
    before = path.lstat().st_mode if os.path.lexists(path) else None
    ended = place.run(*words, f"out={name}" if words[0] == "train" else name)
    if kind in ("pipe", "device", "full device", "folder", "socket") and path.lstat().st_mode != before:
        ended.faults.append(f"loss: a {kind} was replaced")
    return place.check(ended, lambda name: name.startswith(("cache", *WRITTEN)))


KINDS: dict[str, Kind] = {
    "strange values of recipe keys": values,
    "words in any order": words,
    "damaged recipes and studies": plans,
    "damaged images, tables, lists of classes": data_files,
    "damaged cache": caches,
    "damaged files of a finished run": run_files,
    "damaged files of an interrupted run, resumed": resumed,
    "damaged weights": weights,
    "no permission, as an ordinary user": permissions,
    "files that cannot grow": full_disks,
    "strange environment variables": environments,
    "damaged results and runs of a study": studies,
    "JSON files of ours, edited and still JSON": edits,
    "devices, pipes and impossible names as outputs": outputs,
}


def try_case(kind: str, number: int, world: Path, scratch: Path) -> Ended:
    """Try one case in a fresh copy of the world; the number says all about it."""
    draw = random.Random(f"{kind} {number}")
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(world, scratch / "a" / "b" / "case", symlinks=True)
    folder = scratch / "a" / "b" / "case"
    place = Place(folder, scratch, world, photograph(folder))
    os.chdir(place.folder)
    os.environ["VITCLINIC_CACHE"] = str(place.folder / "cache")
    return KINDS[kind](place, draw)


def _prediction(place: Place, words: list[str]) -> str:
    """Return what the undamaged run predicts."""
    if words[1] not in _predictions:
        shutil.rmtree(place.folder / "run")
        shutil.copytree(place.world / "run", place.folder / "run")
        _predictions[words[1]] = run_command(words, place.scratch).out
    return _predictions[words[1]]


_predictions: dict[str, str] = {}
