"""The model card of an exported folder, and sending the folder to a hub."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import yaml

from vitclinic._core.errors import RecipeError, RunError, VitclinicError, first_line
from vitclinic._core.io import read_text
from vitclinic.exam.reporting import read_stored, view_exam
from vitclinic.tasks import headlines
from vitclinic.training import Run

_LOADING = {
    "timm": 'model = timm.create_model("local-dir:FOLDER", pretrained=True)  # or "hf-hub:USER/NAME"',
    "hf": 'model = AutoModelForImageClassification.from_pretrained("FOLDER")  # or "USER/NAME"',
}
_IMPORTS = {"timm": "import timm", "hf": "from transformers import AutoModelForImageClassification"}
_TAG = "vitclinic"
"""In the front matter of every card: by it a folder is known to be an export."""
_OURS = "import vitclinic.models  # adds this network to timm's\n"


def write_card(folder: Path, run: Run, to: str, temperature: float | None = None) -> Path:
    """Write README.md: the data, the recipe, what was measured with intervals, what was found, how to load it.

    Args:
        folder: The exported folder.
        run: The run that the network is of.
        to: `"timm"` or `"hf"`.
        temperature: That of the softmax, if it was fitted.
    """
    recipe, facts = run.recipe, run.data_facts
    classes = facts["classes"]
    front = {
        "library_name": "timm" if to == "timm" else "transformers",
        "pipeline_tag": "image-classification",
        "tags": ["image-classification", "timm", _TAG],
    }
    shown = ", ".join(map(_as_text, classes[:20])) + (f" and {len(classes) - 20} more" if len(classes) > 20 else "")
    height, width = facts["size"]
    from timm.models import model_entrypoint

    architecture = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architecture"]
    ours = _OURS if model_entrypoint(architecture).__module__.startswith("vitclinic") else ""
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---\n",
        f"# {recipe.model.name}, trained on {_as_text(Path(facts['name']).name)}\n",
        f"```python\n{_IMPORTS[to]}\n{ours}\n{_LOADING[to]}\n```\n",
        f"Classifies images of {height} x {width} into {len(classes)} class{'es' * (len(classes) != 1)}: {shown}.\n",
        _describe_input(folder, run, temperature),
        _describe_data(run),
        f"## Recipe\n\n```yaml\n{_recipe_text(run)}```\n",
        _describe_measurements(run),
    ]
    card = folder / "README.md"
    card.write_text("\n".join(part for part in parts if part), encoding="utf-8")
    return card


def is_export(folder: Path) -> bool:
    """Return True if a folder has a card of ours beside a network."""
    card = folder / "README.md"
    if not (folder / "config.json").is_file() or not card.is_file():
        return False
    front = read_text(card, RecipeError).removeprefix("---\n").partition("\n---\n")[0]
    return f"- {_TAG}" in front.splitlines()


def _as_text(name: str) -> str:
    """Return a name as Markdown that shows it as it is: no HTML, no link, no line of its own."""
    return re.sub(r"([\\\\`*_\[\]#|~])", r"\\\1", html.escape(" ".join(name.split()), quote=False))


def _describe_input(folder: Path, run: Run, temperature: float | None) -> str:
    """Return how images are prepared, and what makes probabilities of the logits."""
    way = run.preprocessing
    published = json.loads((folder / "config.json").read_text(encoding="utf-8"))["pretrained_cfg"]
    mean, std = (", ".join(f"{value:.4g}" for value in published[name]) for name in ("mean", "std"))
    sides = [f"{height} x {width}" for height, width in (way.framed, way.size)]
    lines = [
        f"Images are {'RGB' if way.channels == 3 else 'grey'}, resized to cover {sides[0]} pixels (height x width),",
        f"of which the network takes the center crop of {sides[1]}, scaled to [0, 1] and normalized: mean {mean},",
        f"standard deviation {std}. `config.json` has these numbers.",
    ]
    if temperature is not None:
        lines.append(
            f"Probabilities are the softmax of the logits divided by {temperature:.4g}, the temperature that was fitted"
            " on val images; the folder's network returns the logits themselves."
        )
    return "## Input and output\n\n" + " ".join(lines) + "\n"


def _describe_data(run: Run) -> str:
    facts = run.data_facts
    counts = ", ".join(f"{count:,} {split}" for split, count in facts["counts"].items())
    skipped = f" {len(facts['skipped'])} images could not be read." if facts["skipped"] else ""
    return (
        f"## Data\n\n{_as_text(Path(facts['name']).name)}: {counts} images (digest {facts['digest'][:12]}).{skipped}\n"
    )


def _recipe_text(run: Run) -> str:
    """Return the keys of the recipe that were given, without folders of this machine."""
    recipe = run.recipe.model_dump(mode="json", exclude_defaults=True, exclude={"out", "workers", "device", "logging"})
    if isinstance(data := recipe.get("data"), dict):
        data["source"] = Path(str(data["source"])).name
    return yaml.safe_dump(_strip_folders(recipe), sort_keys=False)


def _strip_folders(value: Any) -> Any:
    """Return plain data in which only the last part of every absolute path is left, such as of initial weights."""
    if isinstance(value, dict):
        return {key: _strip_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_strip_folders(item) for item in value]
    return Path(value).name if isinstance(value, str) and value.startswith(("/", "~/")) else value


def _describe_measurements(run: Run) -> str:
    metric, lines = headlines(run.recipe.task)[0], []
    for split, score in run.results.items():
        interval = f" (95% interval {metric.show_interval(score)})" if metric.interval else ""
        value = metric.show(score[metric.name])
        lines.append(f"- {metric.name} on {score['count']:,} {split} images: {value}{interval}")
    try:
        stored = read_stored(run)
    except VitclinicError:  # never examined
        stored = {}
    if stored:
        view = view_exam(str(run.path), stored, run)
        lines += ["", "## Findings", ""]
        lines += [f"- **{found.title}** ({found.severity}): {_as_text(found.statement)}" for found in view.findings]
        lines += [] if view.findings else ["None of the rules found anything."]
    return "\n".join(["## Measured", "", *(lines or ["The run has not been tested."])]) + "\n"


def push_to_hub(folder: str | Path, repository: str, *, private: bool = True) -> str:
    """Send an exported folder to a repository of the Hugging Face hub, which is made if it is not there.

    Nothing else in vitclinic sends anything. The hub's own client finds the login (`hf auth login`) and the server.

    Args:
        folder: What `export` wrote.
        repository: `USER/NAME`.
        private: Only its owner sees a repository that is made.

    Returns:
        The address of the commit.

    Raises:
        RecipeError: The folder is not an exported one.
        RunError: The hub refuses, or cannot be reached.

    Example:
        >>> push_to_hub("runs/photos/export/hf", "me/photos")  # doctest: +SKIP
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file() or not (folder / "model.safetensors").is_file():
        raise RecipeError(f"'{folder}' is not an exported folder; make one by export to timm or hf.")
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        sent = api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Network trained by vitclinic")
    except Exception as error:  # the hub's errors and those of its connection have no common base
        line = first_line(error)
        raise RunError(f"'{repository}' was not sent: {line}.") from error
    return str(sent.commit_url)
