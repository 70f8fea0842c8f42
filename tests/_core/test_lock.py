"""Locks between processes: one holder at a time, no heirs, and machines without `fcntl`."""

import errno
import os
import subprocess
import sys

import filelock
import pytest

from vitclinic._core.errors import LockedError
from vitclinic._core.lock import hold_lock

HOLDER = """
import os, sys, time
from pathlib import Path
from vitclinic._core.lock import hold_lock
with hold_lock(Path(sys.argv[1]), "busy"):
    child = os.fork()
    if child == 0:
        sys.stdout.close()
        time.sleep(600)
    print(child, flush=True)
    time.sleep(600)
"""


def test_a_second_holder_gets_the_sentence_and_the_file_goes_at_the_end(tmp_path):
    file = tmp_path / ".lock"
    with hold_lock(file, "first"), pytest.raises(LockedError, match="in use"), hold_lock(file, "in use"):
        pass
    assert list(tmp_path.iterdir()) == []
    with hold_lock(file, "free again"):
        pass


def test_a_reentrant_lock_is_held_until_its_outermost_end(tmp_path):
    file = tmp_path / ".lock"
    with hold_lock(file, "busy", reentrant=True):
        with hold_lock(file, "busy", reentrant=True):
            pass
        with pytest.raises(LockedError), hold_lock(file, "busy"):
            pass


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_killed_holder_leaves_the_lock_to_none_of_its_forked_children(tmp_path):
    file = tmp_path / ".lock"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(file)], stdout=subprocess.PIPE, text=True)
    child = int(holder.stdout.readline())
    try:
        with pytest.raises(LockedError), hold_lock(file, "busy"):
            pass
        holder.kill()
        holder.wait()
        os.kill(child, 0)  # it lives
        with hold_lock(file, "busy"):
            pass
    finally:
        holder.kill()
        os.kill(child, 9)
        holder.communicate()


def test_a_file_system_without_locks_is_written_to_all_the_same(tmp_path, monkeypatch, caplog):
    def refuse(self):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    with hold_lock(tmp_path / ".lock", "busy"):
        assert "cannot be locked" in caplog.text


WITHOUT_FCNTL = """
import sys, warnings
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None  # as on Windows
warnings.filterwarnings("ignore", "only soft file lock")
from vitclinic.training import resume, train
run = train(
    {
        "model": {"name": "vit_tiny_fitted", "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2},
        "data": {"source": "digits", "limit": 60, "augment": "none"},
        "batch_size": 20,
        "steps": 2,
        "out": sys.argv[1],
    }
)
print(run.status["status"], run.status["step"])
"""


def test_training_works_where_there_is_no_fcntl(tmp_path):
    arguments = [sys.executable, "-c", WITHOUT_FCNTL, str(tmp_path / "run")]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert done.stdout == "finished 2\n", done.stderr
