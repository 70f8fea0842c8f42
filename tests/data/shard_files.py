"""Small shards, as tars and as parquet, and a server for them."""

from __future__ import annotations

import io
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
from PIL import Image

from vitclinic.data.parquet import parquet_bytes


def sample(number: int, classes: int = 3) -> tuple[bytes, int]:
    """A PNG of 8 x 8 pixels and its label."""
    pixels = np.random.default_rng(number).integers(0, 200, (8, 8, 3), dtype=np.uint8)
    label = number % classes
    pixels[:, :, label] += 50
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue(), label


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def write_tars(folder: Path, shards: int = 6, images: int = 10, name: str = "train-{:03}.tar") -> Path:
    """Shards of slightly different length."""
    number = 0
    for shard in range(shards):
        members: dict[str, bytes] = {}
        for _ in range(images + shard % 3):
            members[f"{number:04}.png"], label = sample(number)
            members[f"{number:04}.cls"] = str(label).encode()
            number += 1
        write_tar(folder / name.format(shard), members)
    return folder


def write_parquets(folder: Path, shards: int = 4, images: int = 10) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(shards):
        samples = [sample(images * shard + row) for row in range(images)]
        labels = np.asarray([label for _, label in samples])
        content = parquet_bytes([data for data, _ in samples], ["x.png"] * images, labels, ["red", "green", "blue"])
        (folder / f"train-{shard:05}.parquet").write_bytes(content)
    return folder


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a folder, over http."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
