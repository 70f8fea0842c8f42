"""Work in processes of its own: commands that can be killed, and two real gloo processes.

They are forked from a server that has imported torch and vitclinic once: each would otherwise import them
for seconds.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["vitclinic.training.launch", "vitclinic.exam.examine", "vitclinic.cli"])


class Command:
    """`vitclinic WORDS` in a process group of its own, as a terminal starts it; used like `subprocess.Popen`."""

    def __init__(
        self,
        words: list[str],
        cwd: Path | str = ".",
        environment: Mapping[str, str] | None = None,
        before: Callable[[], None] | None = None,
    ) -> None:
        self._said = tempfile.TemporaryDirectory()
        arguments = (words, os.path.abspath(cwd), {**os.environ, **(environment or {})}, self._said.name, before)
        self._process = SERVER.Process(target=_command, args=arguments)
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("vitclinic", timeout or 0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for its end, and return all that it wrote to standard output and standard error."""
        self.wait(timeout)
        out, error = (Path(self._said.name) / name for name in ("out", "error"))
        return (out.read_text() if out.exists() else "", error.read_text() if error.exists() else "")

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_command(
    *words: str, cwd: Path | str = ".", environment: Mapping[str, str] | None = None, timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    """Run `vitclinic WORDS` to its end."""
    process = Command(list(words), cwd, environment)
    out, error = process.communicate(timeout)
    return subprocess.CompletedProcess(list(words), process.returncode or 0, out, error)


def start_ranks(*words: str, processes: int = 2) -> list[Command]:
    """Start `vitclinic WORDS` in several processes with the environment that torchrun gives its own."""
    common = {
        "WORLD_SIZE": processes,
        "LOCAL_WORLD_SIZE": processes,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
    }
    places = [{**common, "RANK": rank, "LOCAL_RANK": rank} for rank in range(processes)]
    return [Command(list(words), environment={name: str(value) for name, value in each.items()}) for each in places]


def run_ranks(*words: str, processes: int = 2, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """Run `vitclinic WORDS` in several processes to their end; what the leading one says, and the worst exit code."""
    ranks = start_ranks(*words, processes=processes)
    said = [rank.communicate(timeout) for rank in ranks]
    code = max((rank.returncode or 0 for rank in ranks), key=abs)
    return subprocess.CompletedProcess(list(words), code, said[0][0], "".join(error for _, error in said))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def holding(path: Path) -> Iterator[multiprocessing.process.BaseProcess]:
    """Another process that is at a run, and does not get on."""
    held = SERVER.Event()
    process = SERVER.Process(target=_hold, args=(path, held))
    process.start()
    try:
        assert held.wait(60)
        yield process
    finally:
        process.kill()
        process.join()


def _hold(path: Path, held: Any) -> None:
    from vitclinic.training import Run

    with Run(path).lock():
        held.set()
        time.sleep(600)


def in_two_processes(work: Callable[..., Any], folder: Path, *arguments: Any) -> list[Any]:
    """`work(rank, *arguments)` in two processes; what each returned. One that waits in vain is an error."""
    torch.multiprocessing.start_processes(_worker, (work, str(folder), arguments), nprocs=2, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


def _worker(rank: int, work: Callable[..., Any], folder: str, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    meeting, patience = f"file://{folder}/meeting", timedelta(seconds=90)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2, timeout=patience)
    try:
        torch.save(work(rank, *arguments), f"{folder}/{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _command(
    words: list[str], cwd: str, environment: dict[str, str], folder: str, before: Callable[[], None] | None
) -> None:
    """Become the command: its directory, environment, streams, signals and words."""
    multiprocessing.set_start_method(None, force=True)  # its own processes start as they would from a terminal
    os.setpgid(0, 0)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    for descriptor, name in ((1, "out"), (2, "error")):
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT), descriptor)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.path.insert(0, cwd)
    sys.argv = ["vitclinic", *words]
    if before:
        before()
    from vitclinic.cli import main

    main()
