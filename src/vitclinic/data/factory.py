"""The source that `data` of a recipe names: embedded, a folder, tables, or another library's."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from vitclinic._core.errors import DataError, MissingExtraError, did_you_mean
from vitclinic._core.io import find_path
from vitclinic.data.asked import holds_questions, open_asked
from vitclinic.data.coco import open_coco
from vitclinic.data.config import DataConfig
from vitclinic.data.folder import open_folder
from vitclinic.data.masks import open_mask_folder, open_mask_parquet
from vitclinic.data.named import NAMED_DATA, find_missing_data, open_digits, open_hub, open_shapes, open_torchvision
from vitclinic.data.scenes import open_scenes
from vitclinic.data.source import Source

EMBEDDED = ("digits", "shapes", "scenes")


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
    if spec == "digits" or spec.partition(":")[0] in ("shapes", "scenes") or spec.startswith(("torchvision:", "hf:")):
        return
    path = find_path(spec, DataError, "data")
    if path is None:
        raise DataError(f"There is no data at '{spec}'.{_nearby(Path(spec).expanduser())}")
    if not path.is_dir() and not path.is_file():
        raise DataError(f"'{spec}' is a device or a pipe; expected a folder with one sub-folder per class, or parquet.")


def open_source(config: DataConfig) -> Source:
    """Open the source that `data=` names, without decoding an image."""
    check_source(config)
    spec = config.source
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
    return open_mask_parquet(path) if config.target == "mask" else open_parquet(path)


def _nearby(path: Path) -> str:
    try:
        siblings = [p.name for p in path.parent.iterdir()]
    except OSError:
        siblings = []
    return did_you_mean(path.name, [*siblings, *EMBEDDED])
