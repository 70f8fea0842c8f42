"""Do the tasks that learn features learn on real data? Four groups of small runs, seed by seed.

    python benchmarks/representations.py DATA POOL [--groups retrieval dino] [--seeds 3]

DATA has `cifar10/{train,test}.parquet` and `omniglot/characters.parquet`. What docs/results/representations.json has is
not trained again, so that a call goes on where another was stopped: first every group with seed 0, then with seed 1,
and so on. Prints the tables of docs/results/representations.md. Groups, with their cost on one core for each seed:

  retrieval    Omniglot at 48 px, alphabets held out by the seed; ViT of width 64, depth 4, patch 8, with patchify and
               convolutional stem (32 channels), untrained and after 150 steps of 64 images, at wang2022's two rates
               (Table 4) and one between them; crash or stall counted: 2.5 minutes
  contrastive  5,000 images of CIFAR-10, 3 epochs of two views, with and without SAM, then a linear classifier on the
               frozen features for 2 epochs [chen2022 App. C]; a hybrid ViT of size tiny: 3 minutes
  dino         10,000 images of CIFAR-10, recipe `dino` for 3 of its 8 epochs, the same network untrained and supervised
               for as many steps; linear probe and kNN on all test images: 4 minutes
  transfer     the recipe `small` on 25,000 images of CIFAR-10 for an epoch, then on 1,000 of the rest by the protocol
               of `vitclinic transfer` in 100 steps, beside the same without the weights, and the recipe `small` from
               scratch for 100 and 300 steps: 3 minutes
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import torch
from scipy import stats

from vitclinic import examine
from vitclinic._core.distributed import ALONE
from vitclinic._core.io import write_json
from vitclinic._core.statistics import paired_difference
from vitclinic.data import open_data
from vitclinic.experiments.runner import Pool
from vitclinic.experiments.study.measures import describe_end
from vitclinic.experiments.transfer import LRS, plan_transfer
from vitclinic.training import Recipe, Run, build_recipe
from vitclinic.training.overrides import overlay
from vitclinic.training.recipe import InitConfig
from vitclinic.training.trainer import Trainer

RESULTS = Path(__file__).parent.parent / "docs" / "results" / "representations.json"
RATES = (1.6e-3, 9e-3, 5e-2)
"""wang2022's two, and their geometric mean."""
HYBRID = {"name": "hybrid_vit", "size": "tiny"}
PRETRAINED, LABELLED = 25_000, 1_000

Changes = dict[str, Any]
Row = dict[str, Any]
Arms = Iterator[tuple[str, Callable[[], Row]]]
"""(name, function that trains and returns its row); an arm may ask the pool for the run of an earlier one."""


class Bench:
    """Where data and runs are; arms are made by the methods that groups are named after."""

    def __init__(self, data: Path, pool: Path) -> None:
        self.data, self.pool = data, Pool(pool)

    def train(self, base: str, changes: Changes, seed: int) -> Run:
        """Return the run of a shipped recipe with changes."""
        return self.pool.train(self.recipe(base, changes, seed))

    def recipe(self, base: str, changes: Changes, seed: int) -> Recipe:
        """Return a shipped recipe with changes."""
        return build_recipe(overlay(overlay(build_recipe(base).plain(), changes), {"seed": seed, "workers": 0}))

    def retrieval(self, seed: int) -> Arms:
        """Yield patchify and convolutional stem, untrained and at each rate."""
        for name, treatments in (("patchify", []), ("conv stem", [{"conv_stem": {"hidden": 32}}])):
            changes = self._retrieval(treatments, RATES[0], seed)
            yield f"{name}, untrained", partial(self._retrieve_untrained, changes, seed)
        for rate in RATES:
            for name, treatments in (("patchify", []), ("conv stem", [{"conv_stem": {"hidden": 32}}])):
                yield f"{name}, {rate:g}", partial(self._retrieve, self._retrieval(treatments, rate, seed), seed)

    def _retrieval(self, treatments: list[Any], rate: float, seed: int) -> Changes:
        source = str(self.data / "omniglot" / "characters.parquet")
        return {
            "model": {"img_size": 48, "patch_size": 8, "depth": 4},
            "data": {"source": source, "split_by": "alphabet", "split_seed": seed},
            "treatments": treatments,
            "optimizer": {"lr": rate},
            "steps": 150,
            "validation": "50%",
            "checkpoint": "50%",
        }

    def _retrieve_untrained(self, changes: Changes, seed: int) -> Row:
        recipe = self.recipe("retrieval", changes, seed)
        dataset = open_data(recipe.data, size=recipe.image_size)
        trainer = Trainer(recipe, dataset, 1, ALONE, torch.device("cpu"))
        test = trainer.task.evaluate(trainer.network, dataset, "test", ALONE)
        return {"end": "untrained", "map": test["map"], "rank1": test["rank1"], "queries": test["count"]}

    def _retrieve(self, changes: Changes, seed: int) -> Row:
        run = self.train("retrieval", changes, seed)
        found = {"end": describe_end(run)}
        if run.status["status"] != "finished":
            return found
        test = run.results["test"]
        return {**found, "map": test["map"], "rank1": test["rank1"], "queries": test["count"]}

    def contrastive(self, seed: int) -> Arms:
        """Yield supervised contrastive training with and without SAM, each with its linear classifier."""
        yield "supervised contrastive", partial(self._contrast, [], seed)
        yield "with SAM", partial(self._contrast, [{"sam": {"rho": 0.02, "m": 32}}], seed)

    def _contrast(self, treatments: list[Any], seed: int) -> Row:
        images = {
            "source": str(self.data / "cifar10"),
            "limit": 5000,
            "held_out": 0.04,
            "augment": {"level": "light", "flip": True},
        }
        common: Changes = {"model": HYBRID, "data": images, "validation": "50%", "checkpoint": "50%"}
        first = {"treatments": treatments, "optimizer": {"name": "muon", "lr": 1e-2}, "epochs": 3}
        features = self.train("contrastive", overlay(common, first), seed)
        second = {"treatments": [], "init": f"{features.path}@last", "epochs": 2}
        linear = self.train("contrastive-linear", overlay(common, second), seed)
        test = features.results["test"]
        return {"knn": test["knn_accuracy"], "rank": test["rank"], "linear": linear.results["test"]["accuracy"]}

    def dino(self, seed: int) -> Arms:
        """Yield the network untrained, after DINO, and supervised for as many steps."""
        images = {"source": str(self.data / "cifar10"), "limit": 10_000, "held_out": 0.04}
        often = {"validation": "50%", "checkpoint": {"every": "25%", "keep_epochs": [0]}, "epochs": 3}
        alone = {"data": images, **often}
        labels = {"data": images, **often, "model": HYBRID}
        yield "untrained", partial(self._probe, "dino", alone, seed, "epoch-0")
        yield "DINO", partial(self._probe, "dino", alone, seed, "last")
        yield "supervised", partial(self._probe, "small", labels, seed, "last")

    def _probe(self, base: str, changes: Changes, seed: int, checkpoint: str) -> Row:
        run = self.train(base, changes, seed)
        exam = examine(run.at(checkpoint), probes=["knn", "linear_probe"], seed=seed)
        found = {probe: exam[probe].scalars["accuracy"].value for probe in ("knn", "linear_probe")}
        if checkpoint == "last" and base == "dino":
            found["teacher_entropy"] = [row["teacher_entropy"] for row in run.metrics if row["kind"] == "train"][-1]
        return {**found, "status": run.status["status"]}

    def transfer(self, seed: int) -> Arms:
        """Yield the pretrained network as it is, then fine-tuned, and networks from scratch."""
        few = {"data": {"source": str(self.labelled(seed)), "train_on_val": True}, "validation": "100%"}
        pretrain = partial(self._pretrain, seed)
        yield "pretrained, as it is", lambda: _score(pretrain())
        yield "fine-tuned", lambda: self._transfer(pretrain(), seed, keep=True)
        yield "from scratch, the same protocol", lambda: self._transfer(pretrain(), seed, keep=False)
        for steps in (100, 300):
            changes = {**few, "model": HYBRID, "steps": steps, "checkpoint": "50%"}
            yield f"from scratch, recipe small, {steps} steps", partial(self._score_run, changes, seed)

    def _score_run(self, changes: Changes, seed: int) -> Row:
        return _score(self.train("small", changes, seed))

    def _pretrain(self, seed: int) -> Run:
        source = self.part("first", 0, PRETRAINED)
        data = {"source": str(source), "train_on_val": True}
        changes = {"data": data, "model": HYBRID, "epochs": 1, "validation": "100%", "checkpoint": "25%"}
        return self.train("small", changes, seed)

    def _transfer(self, pretrained: Run, seed: int, keep: bool) -> Row:
        """Choose the rate on a sub-split, then train on all images, as `vitclinic transfer`."""
        changes = {"model": HYBRID, "steps": 100, "batch_size": 64, "seed": seed, "workers": 0}
        trials, final = plan_transfer(f"{pretrained.path}@last", self.labelled(seed), changes, lrs=LRS, held_out=0.1)
        if not keep:
            trials, final = ([_forget(one) for one in trials], _forget(final))
        runs = [self.pool.train(trial) for trial in trials]
        scores = [run.results["val"]["accuracy"] if run.status["status"] == "finished" else 0.0 for run in runs]
        rate = LRS[max(range(len(LRS)), key=scores.__getitem__)]
        found = _score(self.pool.train(build_recipe(final, {"optimizer.lr": rate})))
        return {**found, "lr": rate, "trials": dict(zip(map(str, LRS), scores, strict=True))}

    def labelled(self, seed: int) -> Path:
        """Return a folder with 1,000 images behind those of the pretraining, others for every seed."""
        return self.part(f"rest-{seed}", PRETRAINED + seed * LABELLED, LABELLED)

    def part(self, name: str, start: int, count: int) -> Path:
        """Return a folder with some rows of CIFAR-10's training images, and all test images."""
        folder = self.pool.folder / "data" / name
        if not (folder / "test.parquet").is_file():
            folder.mkdir(parents=True, exist_ok=True)
            table = parquet.read_table(self.data / "cifar10" / "train.parquet").slice(start, count)
            parquet.write_table(table, folder / "train.parquet")
            parquet.write_table(parquet.read_table(self.data / "cifar10" / "test.parquet"), folder / "test.parquet")
        return folder


def _forget(recipe: Recipe) -> Recipe:
    return recipe.model_copy(update={"init": InitConfig()})


def _score(run: Run) -> Row:
    status = run.status["status"]
    return {"accuracy": run.results["test"]["accuracy"] if status == "finished" else None, "status": status}


GROUPS: Mapping[str, Callable[[Bench, int], Arms]] = {
    "retrieval": Bench.retrieval,
    "contrastive": Bench.contrastive,
    "dino": Bench.dino,
    "transfer": Bench.transfer,
}
COLUMNS = {
    "retrieval": ("map", "rank1"),
    "contrastive": ("knn", "linear"),
    "dino": ("knn", "linear_probe"),
    "transfer": ("accuracy",),
}
AGAINST = {"contrastive": "supervised contrastive", "dino": "untrained", "transfer": "fine-tuned"}
"""The arm that others are compared with; patchify at the same rate for retrieval."""


def load() -> dict[str, Any]:
    """Return what is known so far, of all groups."""
    found: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    return found


def run_group(bench: Bench, group: str, seed: int) -> None:
    """Train what is missing of a group with a seed, and store it arm by arm."""
    for name, train in GROUPS[group](bench, seed):
        if str(seed) in load().get(group, {}).get(name, {}):
            continue
        start = time.process_time()
        row = train() | {"cpu_seconds": round(time.process_time() - start, 1), "date": str(date.today())}
        results = load()
        results.setdefault(group, {}).setdefault(name, {})[str(seed)] = row
        write_json(RESULTS, results)
        print(f"{group}, {name}, seed {seed}: {row}", flush=True)


def summarize(values: list[float]) -> str:
    """Return mean and 95% t interval over seeds, in percent."""
    if not values:
        return "none"
    mean = 100 * statistics.mean(values)
    if len(values) < 2:
        return f"{mean:.1f}"
    half = stats.t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean:.1f} ± {100 * half:.1f}"


def compare(rows: Mapping[str, Row], others: Mapping[str, Row], column: str) -> str:
    """Return what rows have more than others, paired by seed, in points."""
    both = [s for s in rows if column in rows[s] and column in others.get(s, {})]
    pairs = [(others[s][column], rows[s][column]) for s in both if None not in (others[s][column], rows[s][column])]
    if len(pairs) < 2:
        return ""
    found = paired_difference(*map(list, zip(*pairs, strict=True)))
    return f"{100 * found.mean:+.1f} ({100 * found.low:+.1f} to {100 * found.high:+.1f})"


def print_table(group: str, arms: Mapping[str, Mapping[str, Row]]) -> None:
    """Print the arms of a group."""
    columns = COLUMNS[group]
    heads = [head for column in columns for head in (column, f"{column}: difference")]
    print(f"\n### {group}\n\n| | {' | '.join(heads)} | ends | CPU s | seeds |\n|---" + "|---" * (len(heads) + 3) + "|")
    for name, rows in arms.items():
        other = name.replace("conv stem", "patchify") if group == "retrieval" else AGAINST[group]
        cells = []
        for column in columns:
            cells.append(summarize([row[column] for row in rows.values() if row.get(column) is not None]))
            cells.append("" if other == name else compare(rows, arms.get(other, {}), column))
        ends = ", ".join(row.get("end", row.get("status", "")) for row in rows.values())
        cost = statistics.mean(row["cpu_seconds"] for row in rows.values())
        print(f"| {name} | {' | '.join(cells)} | {ends} | {cost:.0f} | {len(rows)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("pool", type=Path)
    parser.add_argument("--groups", nargs="*", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    bench = Bench(options.data, options.pool)
    for seed in range(options.seeds):
        for group in options.groups:
            run_group(bench, group, seed)
    for group, arms in load().items():
        print_table(group, arms)


if __name__ == "__main__":
    main()
