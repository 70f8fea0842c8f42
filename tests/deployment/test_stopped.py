"""SIGTERM while images are predicted or a network is exported: one sentence, and nothing half-written is left."""

import os
import signal
import time

import pytest

from tests.processes import Command


def stop_when(process, begun):
    """Send SIGTERM to the process group, as a scheduler does, as soon as something has begun; return what it said."""
    patience = time.monotonic() + 100
    while not begun() and process.poll() is None and time.monotonic() < patience:
        time.sleep(0.005)
    assert process.poll() is None, process.communicate()
    os.killpg(process.pid, signal.SIGTERM)
    _, error = process.communicate(60)
    return process.returncode, error


@pytest.mark.parametrize("workers", ["0", "2"])
def test_predict_leaves_no_table_and_no_traceback(workers, run, tmp_path):
    image = next((run.path.parent / "photos" / "test").rglob("*.png"))
    new = tmp_path / "new"
    new.mkdir()
    for number in range(5000):
        (new / f"{number}.png").symlink_to(image)
    words = ["predict", str(run.path), str(new), "-o", "big.csv", "--workers", workers, "--batch-size", "4"]
    process, table = Command(words, tmp_path), tmp_path / ".big.csv.tmp"
    # Once there are rows: Python loses an exception that is raised while it forks workers.
    stopped = stop_when(process, lambda: table.exists() and table.stat().st_size > 0)
    assert stopped == (143, "interrupted; no table was written\n")
    assert [file.name for file in tmp_path.iterdir()] == ["new"]


def test_export_leaves_no_staging_folder(run, tmp_path):
    process = Command(["export", str(run.path), "--to", "torch-export", "-o", "net.pt2"], tmp_path)
    assert stop_when(process, lambda: any(tmp_path.iterdir())) == (143, "interrupted; nothing was written\n")
    assert list(tmp_path.iterdir()) == []
