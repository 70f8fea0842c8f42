"""The source that `data` of a recipe names: embedded, a folder, tables, or another library's.

A survey of a source's headers says how large its images are, before any of them is decoded.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from vitclinic._core.errors import DataError, MissingExtraError, did_you_mean
from vitclinic._core.io import find_path, sign
from vitclinic.data.cache import Progress, cache_folder, read_stored, write_atomically
from vitclinic.data.coco import open_coco
from vitclinic.data.config import DataConfig
from vitclinic.data.decoding import UNREADABLE, Size, is_grey
from vitclinic.data.folder import open_folder
from vitclinic.data.masks import open_mask_folder, open_mask_parquet
from vitclinic.data.named import NAMED_DATA, find_missing_data, open_digits, open_hub, open_shapes, open_torchvision
from vitclinic.data.question_files import holds_questions, open_asked
from vitclinic.data.scenes import open_scenes
from vitclinic.data.shards.images import ShardRecords
from vitclinic.data.shards.names import check_shards, is_pattern, is_sharded
from vitclinic.data.shards.source import open_shards
from vitclinic.data.source import Source

EMBEDDED = ("digits", "shapes", "scenes")
PREFIXES = ("shapes", "scenes", "torchvision", "hf")


def check_source(config: DataConfig) -> None:
    """Raise a DataError if the path of a source does not exist, without reading anything."""
    spec = config.source
    if find_missing_data(spec) is not None:
        expected = "a folder of class folders, parquet, or torchvision:NAME@FOLDER"
        if NAMED_DATA[spec].target != "class":
            expected = "its folder"
        raise DataError(
            f"{NAMED_DATA[spec].title} does not come with vitclinic, and there is no folder '{spec}' here: give your"
            f" copy of it as `data` ({expected})."
        )
    if "://" not in spec and (spec == "digits" or spec.partition(":")[0] in PREFIXES):
        return
    if is_pattern(spec):
        return check_shards(spec)
    path = find_path(spec, DataError, "data")
    if path is None:
        raise DataError(f"There is no data at '{spec}'.{_nearby(Path(spec).expanduser())}")
    if not path.is_dir() and not path.is_file():
        raise DataError(f"'{spec}' is a device or a pipe; expected a folder with one sub-folder per class, or parquet.")


def open_source(config: DataConfig, progress: Progress = lambda what, done, total: None) -> Source:
    """Open the source that `data=` names, without decoding an image."""
    check_source(config)
    spec = config.source
    if "://" in spec:  # hf://datasets/... is a URL, not a name of the hub
        return open_shards(config, progress)
    if spec == "digits":
        return open_digits()
    if spec.partition(":")[0] == "shapes":
        return open_shapes(spec, config.split_seed)
    if spec.partition(":")[0] == "scenes":
        return open_scenes(spec, config.split_seed)
    if spec.startswith("torchvision:"):
        return open_torchvision(spec)
    if spec.startswith("hf:"):
        return open_hub(spec)
    if is_pattern(spec) or (config.target == "class" and is_sharded(spec)):
        return open_shards(config, progress)
    path = Path(spec).expanduser()
    if config.target == "questions" or holds_questions(path):
        return open_asked(path, config)
    if path.suffix == ".parquet" or (path.is_dir() and any(path.glob("*.parquet"))):
        return _open_parquet(path, config)
    if config.target == "objects":
        return open_coco(path, config.on_error)
    if path.is_file():
        raise DataError(f"'{spec}' is a file; expected a folder with one sub-folder per class, parquet or JSONL.")
    return open_mask_folder(path) if config.target == "mask" else open_folder(path, config.on_error)


def _open_parquet(path: Path, config: DataConfig) -> Source:
    if find_spec("pyarrow") is None:
        raise MissingExtraError(f"data={path}", "parquet")
    from vitclinic.data.parquet import open_parquet

    if config.target == "objects":
        from vitclinic.data.parquet_objects import open_parquet_objects

        return open_parquet_objects(path, config.on_error)
    return open_mask_parquet(path) if config.target == "mask" else open_parquet(path, config.split_column)


def _nearby(path: Path) -> str:
    try:
        siblings = [p.name for p in path.parent.iterdir()]
    except OSError:
        siblings = []
    return did_you_mean(path.name, [*siblings, *EMBEDDED])


LARGEST_DEFAULT, STEP, SMALLEST_VARIED = 224, 16, 32
"""Unless a size is asked for: images of one size keep it up to 224; of different sizes they are brought to the largest
multiple of 16, from 32 to 224, that is not above the median shorter side."""

_AT_MOST = 50_000
_LOOKED_AT = 500
"""Images in shards, which are fetched for it."""
_SURVEY_FORMAT = 2


@dataclass(frozen=True)
class Survey:
    """Default size and channels, and the median shorter side of the images."""

    size: Size
    channels: int
    shorter_side: float


def survey(source: Source, progress: Progress) -> Survey:
    """Return the survey of a source, which is made once per machine."""
    if source.uniform is not None:
        size, channels = source.uniform
        return Survey(size, channels, float(min(size)))
    stored = cache_folder() / "surveys" / f"{source.fingerprint[:32]}-{_SURVEY_FORMAT}.json"
    values = read_stored(stored, {"size": list, "channels": int, "shorter_side": (int, float)})
    if values is not None and len(values["size"]) == 2 and all(isinstance(side, int) for side in values["size"]):
        return Survey((values["size"][0], values["size"][1]), values["channels"], values["shorter_side"])
    made = _survey(source, progress)
    write_atomically(stored, json.dumps(sign(asdict(made))))
    return made


def _survey(source: Source, progress: Progress) -> Survey:
    """Read the headers of the main images (50,000 of them, evenly spaced, if there are more)."""
    sizes: list[tuple[int, int]] = []
    grey = True
    records = source.main
    chosen = np.unique(np.linspace(0, len(records) - 1, min(len(records), _AT_MOST)).astype(int))
    if isinstance(records, ShardRecords):
        chosen = records.choose(np.arange(len(records)), _LOOKED_AT)
    for number, index in enumerate(chosen):
        progress("looking at", number + 1, len(chosen))
        try:
            with records.read(int(index)) as image:
                sizes.append(image.size)
                grey = grey and is_grey(image)
        except UNREADABLE:
            continue  # decoding it will say so, with the file's name
    shorter = float(np.median([min(size) for size in sizes] or [LARGEST_DEFAULT]))
    varied = len(set(sizes)) != 1
    side = min(max(SMALLEST_VARIED, int(shorter) // STEP * STEP) if varied else int(shorter), LARGEST_DEFAULT)
    return Survey((side, side), 1 if grey and sizes else 3, shorter)
