"""The images that networks are examined on: opened once for all networks that see them alike."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

from vitclinic._core.callback import Callback
from vitclinic._core.distributed import Distributed
from vitclinic._core.errors import RecipeError
from vitclinic.data import DataConfig, Dataset, Normalization, load_batches, open_data
from vitclinic.data.decoding import Size
from vitclinic.exam.targets import Network
from vitclinic.probes.loading import Data, is_loader


class ExamData:
    """What the user gave as data, for networks of different sizes, channels and origins."""

    def __init__(
        self,
        data: Data | None,
        *,
        size: int | None,
        limit: int | None,
        normalized: bool | None,
        distributed: Distributed,
        callback: Callback,
    ) -> None:
        """Note the data; nothing is read yet.

        Args:
            data: As in `examine`; None stands for what each run was trained on.
            size: Pixels a side for networks that take any.
            limit: Read no more than so many images of a loader.
            normalized: The loader's images are, or are not, normalized.
            distributed: The leading process decodes a source first, and the others find it decoded.
            callback: Hears of reading.
        """
        self.data = str(data) if isinstance(data, Path) else data
        self.size, self.limit, self.normalized = size, limit, normalized
        self.distributed, self.callback = distributed, callback
        self._open_source = cache(self._open_uncached)
        self._loaded: dict[Any, Dataset] = {}

    def open(self, network: Network, normalization: Normalization | None = None) -> Dataset:
        """Return the images for a network, as many pixels and channels as it takes.

        Raises:
            RecipeError: If there is no data: none was given, and the network is not a run's.
        """
        data = self.data if self.data is not None else network.data
        if data is None:
            raise RecipeError(f"Say on which images to examine '{network.name}': give `data` (only a run has its own).")
        if is_loader(data):
            return self._read_loader(data, normalization)
        if isinstance(data, Dataset):
            return data
        if isinstance(data, str) and network.data is not None and _is_same_place(data, network.data.source):
            data = network.data  # with the run's own splits: its test images are then those it has not seen
        config = data if isinstance(data, DataConfig) else DataConfig(source=str(data))
        size = network.size if network.size is not None else self.size and (self.size, self.size)
        return self._open_source(config.model_dump_json(), size or None, network.channels)

    def _read_loader(self, data: Any, normalization: Normalization | None) -> Dataset:
        """Read a loader once for all networks whose input is normalized alike."""
        key = None if normalization is None else (tuple(normalization.mean), tuple(normalization.std))
        if key not in self._loaded:
            self._loaded[key] = load_batches(
                data, limit=self.limit, normalization=normalization, normalized=self.normalized
            )
        return self._loaded[key]

    def _open_uncached(self, config: str, size: Size | None, channels: int | None) -> Dataset:
        source = DataConfig.model_validate_json(config)
        opened = partial(open_data, source, size=size, channels=channels, progress=self.callback.on_progress)
        return self.distributed.leader_first(opened)


def _is_same_place(one: str, other: str) -> bool:
    return one == other or Path(one).expanduser().resolve() == Path(other).expanduser().resolve()
