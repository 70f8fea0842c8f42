"""How fast training images come out of shards, beside webdataset and datasets on the same shards.

    pip install webdataset datasets
    python benchmarks/shards.py [--rounds 7] [--images 240] [--workers 1] [--out docs/results/shards.md]

Photographs of 500 x 375 as JPEG in eight tars, and the same in eight parquet files, on a local disk; each reader
decodes them, takes a random resized crop of 224 x 224, mirrors half of them and makes batches of 32. They take turns,
each with workers of its own; what counts is the processor time of all reading processes, which other work on the
machine changes less than the time on the clock. Both are shown.
"""

from __future__ import annotations

import argparse
import gc
import io
import os
import resource
import statistics
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageFilter

SHARDS, BATCH, SIDE = 8, 32, 224
READERS = ("vitclinic, tars", "webdataset, tars", "vitclinic, parquet", "datasets, parquet")

PAGE = """# Reading shards

`python benchmarks/shards.py --rounds {rounds} --images {images} --workers {workers}` ({date}; {cores} cores, torch on
one thread a process, a load of {load} by other work): {images} photographs of 500 x 375 (JPEG, quality 90) a shard,
eight shards, batches of 32 random resized crops of 224 x 224, half of them mirrored. They take turns; seconds of one
epoch, median and quartiles of {rounds} rounds. *Ratio*: images for each second of processor time, ours over theirs, of
the same round.

| reader | seconds of processor time | seconds on the clock | ratio |
|---|---|---|---|
{rows}

Ours is `TrainingStream` with `augment: light`, in the order of (seed, epoch). webdataset has `shardshuffle` and a
buffer of 1,000 images, datasets is streamed with the same buffer; both are followed by torchvision's RandomResizedCrop
(bicubic), flip and ToTensor, which is what most people write. The index, made once, is not in the times of ours; the
checksum of the copies that parquet is read from is.
"""


def write_shards(folder: Path, images: int) -> None:
    """Write the same photographs as tars and as parquet."""
    from vitclinic.data.parquet import parquet_bytes

    random = np.random.default_rng(0)
    for shard in range(SHARDS):
        files, labels = [], random.integers(0, 10, images)
        with tarfile.open(folder / f"train-{shard:03}.tar", "w") as tar:
            for number, label in enumerate(labels):
                coarse = Image.fromarray(random.integers(0, 256, (24, 32, 3), dtype=np.uint8))
                photo, file = coarse.resize((500, 375)).filter(ImageFilter.UnsharpMask()), io.BytesIO()
                photo.save(file, "JPEG", quality=90)
                files.append(file.getvalue())
                for suffix, data in (("jpg", files[-1]), ("cls", str(label).encode())):
                    member = tarfile.TarInfo(f"{shard:03}{number:05}.{suffix}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
        table = parquet_bytes(files, ["x.jpg"] * images, labels, [str(label) for label in range(10)])
        (folder / f"train-{shard:05}.parquet").write_bytes(table)


def read_ours(pattern: str, count: int, workers: int) -> Iterator[Any]:
    """Return an epoch of batches, after all that is done once."""
    from vitclinic.data import Augment, DataConfig, TrainingStream, open_data

    dataset = open_data(DataConfig(source=pattern, held_out=0), size=SIDE)
    stream = TrainingStream(dataset, Augment(level="light"), seed=0)
    requests = [range(start, start + BATCH) for start in range(0, count, BATCH)]
    return (batch.images for batch in stream.batches(requests, workers))


def transform() -> Any:
    """Return what is usually written after a reader."""
    from torchvision import transforms

    bicubic = transforms.InterpolationMode.BICUBIC
    crop = transforms.RandomResizedCrop(SIDE, interpolation=bicubic)
    return transforms.Compose([crop, transforms.RandomHorizontalFlip(), transforms.ToTensor()])


def read_webdataset(pattern: str, count: int, workers: int) -> Iterator[Any]:
    """Return an epoch of batches of webdataset."""
    import webdataset

    data = webdataset.WebDataset(pattern, shardshuffle=SHARDS, empty_check=False).shuffle(1000).decode("pil")
    data = data.to_tuple("jpg", "cls").map_tuple(transform(), None).batched(BATCH)
    return (images for images, _ in webdataset.WebLoader(data, batch_size=None, num_workers=workers))


class Transformed:
    """A row of `datasets`, transformed; a class, so that it can be sent to workers."""

    def __init__(self) -> None:
        self.transform = transform()

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        return {"image": self.transform(row["image"].convert("RGB")), "label": row["label"]}


def read_datasets(folder: str, count: int, workers: int) -> Iterator[Any]:
    """Return an epoch of batches of datasets, streamed."""
    import datasets
    from torch.utils.data import DataLoader

    files = sorted(str(path) for path in Path(folder).glob("*.parquet"))
    rows = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    rows = rows.shuffle(seed=0, buffer_size=1000).map(Transformed())
    return (batch["image"] for batch in DataLoader(rows, batch_size=BATCH, num_workers=workers))


def read(reader: str, folder: Path, count: int, workers: int) -> dict[str, float]:
    """Read an epoch; return its seconds on the clock and of the processor, without those of imports and the index."""
    name, _, kind = reader.partition(", ")
    braces = "{000..007}.tar" if kind == "tars" else "{00000..00007}.parquet"
    work = {"vitclinic": read_ours, "webdataset": read_webdataset, "datasets": read_datasets}[name]
    batches = work(str(folder) if name == "datasets" else f"{folder}/train-{braces}", count, workers)
    started, before = time.perf_counter(), processor_seconds()
    seen = sum(len(images) for images in batches)
    assert seen >= count, (reader, seen)
    del batches
    gc.collect()  # its workers end
    return {"clock": time.perf_counter() - started, "processor": processor_seconds() - before}


def processor_seconds() -> float:
    """Return the processor time of this process and of its workers that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def compare(folder: Path, rounds: int, images: int, workers: int) -> dict[str, list[dict[str, float]]]:
    """Return the seconds of each reader in each round."""
    times: dict[str, list[dict[str, float]]] = {reader: [] for reader in READERS}
    for number in range(rounds + 1):
        for reader in READERS if number % 2 == 0 else READERS[::-1]:
            seconds = read(reader, folder, SHARDS * images, workers)
            if number:  # the first round imports what it needs, and makes indexes
                times[reader].append(seconds)
            print(number, reader, seconds, flush=True)
    return times


def quartiles(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.3g} ({low:.3g} to {high:.3g})"


def describe(times: dict[str, list[dict[str, float]]]) -> Iterator[str]:
    """Yield the rows of the table."""
    for place, reader in enumerate(READERS):
        clock, used = ([seconds[kind] for seconds in times[reader]] for kind in ("clock", "processor"))
        ratio = ""
        if place % 2 == 0:
            theirs = [seconds["processor"] for seconds in times[READERS[place + 1]]]
            ratio = quartiles([other / own for own, other in zip(used, theirs, strict=True)])
        yield f"| {reader} | {quartiles(used)} | {quartiles(clock)} | {ratio} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--images", type=int, default=240)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(VITCLINIC_CACHE=f"{folder}/cache", HF_HOME=f"{folder}/hf", HF_HUB_OFFLINE="1")
        write_shards(Path(folder), given.images)
        times = compare(Path(folder), given.rounds, given.images, given.workers)
    rows = "\n".join(describe(times))
    print(rows)
    if given.out:
        facts = {"date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count(), "load": f"{load:.0f}"}
        known = {"rounds": given.rounds, "images": given.images, "workers": given.workers}
        given.out.write_text(PAGE.format(rows=rows, **facts, **known))


if __name__ == "__main__":
    main()
