"""The verb `features`: one embedding for each image of a data set, to be used elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitclinic._core.callback import Callback, CallbackList
from vitclinic._core.distributed import ALONE, pick_device
from vitclinic._core.errors import MissingExtraError
from vitclinic._core.io import staged, write_errors
from vitclinic.data import Dataset
from vitclinic.data.split import name_images
from vitclinic.exam.request import SPLITS, check_features_file, check_split
from vitclinic.exam.targets import ExamData, Target, resolve
from vitclinic.probes.features.embeddings import embed
from vitclinic.probes.guards import preserve_state
from vitclinic.probes.loading import Data
from vitclinic.probes.subject import Subject


@dataclass(frozen=True)
class Features:
    """The embeddings of images.

    Attributes:
        embeddings: One row for each image, [n, D] in float32.
        labels: Its class index, [n].
        paths: Its file, or its table and row.
        splits: `train`, `val` or `test`, for each image.
        classes: The names of the classes.
    """

    embeddings: NDArray[np.float32]
    labels: NDArray[np.int64]
    paths: tuple[str, ...]
    splits: tuple[str, ...]
    classes: tuple[str, ...]

    def write(self, path: str | Path) -> Path:
        """Write a parquet file with the columns path, split, label, class and embedding.

        Args:
            path: The file; one that is there is replaced when the new one is whole.

        Returns:
            The path.

        Raises:
            MissingExtraError: pyarrow is not installed.
            RunError: The file cannot be written, or is a folder or a device.
        """
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError:
            raise MissingExtraError(f"'{path}'", "parquet") from None
        file = Path(path)
        names = [self.classes[label] if 0 <= label < len(self.classes) else None for label in self.labels]
        columns = {
            "path": pa.array(self.paths, pa.string()),
            "split": pa.array(self.splits, pa.string()),
            "label": pa.array(self.labels, pa.int64()),
            "class": pa.array(names, pa.string()),
            "embedding": pa.FixedSizeListArray.from_arrays(pa.array(self.embeddings.ravel()), self.embeddings.shape[1]),
        }
        with write_errors(file):
            file.parent.mkdir(parents=True, exist_ok=True)
        with staged(file) as staging:
            pq.write_table(pa.table(columns), staging)
        return file


def features(
    target: Target,
    data: Data | None = None,
    *,
    split: str | None = None,
    limit: int | None = None,
    size: int | None = None,
    batch_size: int = 64,
    device: str = "auto",
    out: str | Path | None = None,
    callbacks: tuple[Callback, ...] = (),
) -> Features:
    """Compute one embedding for each image: what a network's classifier reads, or what one without a head returns.

    Features with positions are averaged over them.

    Args:
        target: What `examine` takes: a run, `timm:NAME`, `torchvision:NAME`, `hf:NAME`, `module:function` or a network.
        data: The images, as for `examine`; a run's own unless given.
        split: `train`, `val` or `test`; all images unless given.
        limit: At most so many images of a split, in class proportions.
        size: Pixels a side for networks that take any size.
        batch_size: Images per forward pass.
        device: `"auto"`, `"cpu"`, `"cuda"` ...
        out: Also write this parquet file.
        callbacks: Told of reading.

    Returns:
        Embeddings, labels, paths, splits and class names.

    Raises:
        VitclinicError: The target, the data or the file cannot be used; the message says why.

    Example:
        >>> import timm
        >>> network = timm.create_model("test_vit", img_size=8, patch_size=2, in_chans=1, num_classes=0)
        >>> features(network, "digits", split="test", limit=20).embeddings.shape
        (20, 64)
    """
    if split is not None:
        check_split(split)
    if out is not None:
        check_features_file(str(out))
    opened = ExamData(
        data, size=size, limit=limit, normalized=None, distributed=ALONE, callback=CallbackList(callbacks)
    )
    network = resolve(target, pick_device(device))
    dataset = opened.open(network)
    parts = []
    for name in [split] if split is not None else _list_splits(dataset):
        subject = Subject(network.network, dataset, name=network.name, split=name, limit=limit, batch_size=batch_size)
        with preserve_state(subject.network, subject.seed):
            embeddings = embed(subject).numpy()
        images = subject.images
        parts.append((embeddings, images.labels, name_images(images), [name] * len(images)))
    found = Features(
        np.concatenate([part[0] for part in parts]),
        np.concatenate([part[1] for part in parts]),
        tuple(path for part in parts for path in part[2]),
        tuple(name for part in parts for name in part[3]),
        tuple(dataset.classes),
    )
    if out is not None:
        found.write(out)
    return found


def _list_splits(dataset: Dataset) -> list[str]:
    """Return the splits that have images; one of them if all are the same images."""
    filled = [name for name in SPLITS if len(dataset.splits.get(name, ()))]
    return filled[-1:] if dataset.undivided else filled
