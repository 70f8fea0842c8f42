"""The base of the probes that show a network changed images, and how processes divide the work."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any, ClassVar, TypeVar

from numpy.typing import NDArray
from pydantic import Field

from vitclinic.probes.probe import Cheaper, Need, OwningProbe
from vitclinic.probes.subject import Subject

T = TypeVar("T")


class BehaviourProbe(OwningProbe):
    """Base class of probes that show the network modified versions of the exam's images."""

    needs: ClassVar[frozenset[Need]] = frozenset({"labels"})
    by_default: ClassVar[bool] = False
    cheaper: ClassVar[Cheaper] = ({"images": 128},)

    images: Annotated[int, Field(ge=1)] = Field(512, description="maximum number of images (stratified sample)")

    def view(self, subject: Subject) -> Subject:
        return subject if self.images >= len(subject) else subject.on(subject.split, self.images)


def divide_images(
    subject: Subject,
    what: str,
    total: int,
    mine: Iterable[T],
    measure_batch: Callable[[T], int],
    found: Iterable[NDArray[Any]],
) -> None:
    """Measure `total` images, each process its own share, and give all processes the results for all images.

    `measure_batch` takes one of this process's batches (`mine`), writes its results into the arrays `found` and returns
    the number of images in the batch. Entries that no process has written yet must be zero: the shares are summed.
    """
    arrays, distributed = list(found), subject.distributed

    def own() -> list[NDArray[Any]]:
        seen = 0
        for batch in mine:
            seen += measure_batch(batch)
            subject.progress(what, min(seen * distributed.size, total), total)
        return arrays

    shares = distributed.gather(own)
    for rank, theirs in enumerate(shares):
        if rank != distributed.rank:
            for array, other in zip(arrays, theirs, strict=True):
                array += other
