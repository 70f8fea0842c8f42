"""A real Ray cluster on this machine: two nodes, each a process group of its own, and what becomes of a lost worker."""

import importlib.util
import json
import os
import signal
import threading
import time

import pytest

from vitclinic._core.callback import Callback
from vitclinic._core.errors import RunError
from vitclinic.experiments.study.conduct import study
from vitclinic.training import Run

from .networks import STUDY, TINY, tiny_study
from .test_conduct import DIVERGING, IMPOSSIBLE, table

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the extra [ray] is not installed"),
]

LONG = {**TINY, "steps": 300, "checkpoint": "20 steps", "validation": "1000 steps"}


class Listening(Callback):
    def __init__(self):
        self.told = []

    def on_progress(self, what, done, total):
        self.told.append((done, total))


@pytest.fixture(scope="module")
def address():
    """Of a cluster of two nodes with one core each, on this machine's inner address alone."""
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # else Ray looks for it at the outer address
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    for _ in range(2):
        cluster.add_node(
            num_cpus=1, node_ip_address="127.0.0.1", include_dashboard=False, object_store_memory=100 * 2**20
        )
    cluster.wait_for_nodes()
    yield cluster.address
    cluster.shutdown()


class Victim:
    """The first run with so many rows, whose worker is killed by -9."""

    def __init__(self, pool, rows):
        self.pool, self.count = pool, rows
        self.path, self.rows = None, []
        self.thread = threading.Thread(target=self._kill, daemon=True)
        self.thread.start()

    def _kill(self):
        while self.path is None:
            time.sleep(0.01)
            for file in self.pool.glob("*/metrics.jsonl"):
                run = Run(file.parent)
                self.rows = run.metrics
                if len(self.rows) >= self.count:
                    self.path = run.path
                    os.kill(run.status["process"], signal.SIGKILL)
                    return


def test_a_lost_worker_s_run_is_tried_again_goes_on_and_gives_the_same_table(address, tmp_path):
    arms = {**STUDY["arms"], "absurd": DIVERGING, "impossible": IMPOSSIBLE}
    asked = tiny_study(base=LONG, arms=arms)
    listener = Listening()
    victim = Victim(tmp_path / "ray" / "pool", rows=90)
    found = study(asked, out=tmp_path / "ray", ray=address, seeds=1, callbacks=[listener])
    victim.thread.join(timeout=1)
    assert found.statuses["fast"] == {0: "finished"}
    assert listener.told[-1] == (4, 4)
    assert any(done % 1 for done, _ in listener.told)
    assert table(found) == table(study(asked, out=tmp_path / "here", seeds=1))
    # It went on from the checkpoint at step 80: what was recorded before, timing and all, is there still.
    kept = [row for row in victim.rows if row["step"] <= 80]
    assert len(kept) == 80
    assert Run.open(victim.path).metrics[:80] == kept


def test_stopped_the_runs_are_saved(address, tmp_path):
    class Stopping(Callback):
        def on_progress(self, what, done, total):
            if done > 0.2:
                raise KeyboardInterrupt

    asked = tiny_study(base={**LONG, "checkpoint": "1000 steps"})
    with pytest.raises(KeyboardInterrupt):
        study(asked, out=tmp_path, ray=address, seeds=1, callbacks=[Stopping()])
    statuses = [json.loads(file.read_text()) for file in tmp_path.glob("pool/*/status.json")]
    assert "interrupted" in {status["status"] for status in statuses}
    # One of the two may have come to its end before the stop reached it.
    assert {status["status"] for status in statuses} <= {"interrupted", "finished"}
    assert all(status["step"] > 0 for status in statuses)


@pytest.fixture
def nodes():
    """A cluster of this test alone, whose processes may be killed: a head without cores and two machines with one."""
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    import ray
    from ray.cluster_utils import Cluster

    ray.shutdown()  # of the module's own cluster
    cluster = Cluster()
    for cores in (0, 1, 1):
        cluster.add_node(
            num_cpus=cores, node_ip_address="127.0.0.1", include_dashboard=False, object_store_memory=100 * 2**20
        )
    cluster.wait_for_nodes()
    yield cluster
    ray.shutdown()
    cluster.shutdown()


class Killing(Callback):
    """Kills a process of the cluster once the runs are under way."""

    def __init__(self, cluster, name, own):
        self.cluster, self.name, self.own, self.killed = cluster, name, own, False

    def on_progress(self, what, done, total):
        if done > 0.2 and not self.killed:
            self.killed = True
            import ray

            here = ray.get_runtime_context().get_node_id()
            machines = [node for node in self.cluster.list_all_nodes() if self.name in node.all_processes]
            if self.name == "raylet":
                machines = [node for node in machines if (node.node_id == here) == self.own]
            os.kill(machines[-1].all_processes[self.name][0].process.pid, signal.SIGKILL)


def test_a_lost_machine_is_told_and_its_run_goes_on_elsewhere(nodes, tmp_path, caplog):
    asked = tiny_study(base={**LONG, "steps": 4000})  # Ray takes some seconds to notice
    killing = Killing(nodes, "raylet", own=False)
    found = study(asked, out=tmp_path / "ray", ray=nodes.address, seeds=1, callbacks=[killing])
    assert killing.killed
    assert "A machine of the Ray cluster is gone (127.0.0.1)" in caplog.text
    assert table(found) == table(study(asked, out=tmp_path / "here", seeds=1))


@pytest.mark.parametrize(
    ("process", "sentence"),
    [("gcs_server", r"^The head of the Ray cluster \(.*\) is gone"), ("raylet", r"^The Ray of this machine is gone")],
)
def test_a_lost_head_is_one_sentence_and_the_same_command_goes_on(nodes, tmp_path, process, sentence):
    asked = tiny_study(
        base={**LONG, "steps": 15000}
    )  # Ray takes some seconds to notice; then the runs must still go on
    killing = Killing(nodes, process, own=True)
    with pytest.raises(RunError, match=sentence):
        study(asked, out=tmp_path, ray=nodes.address, seeds=1, callbacks=[killing])
    steps = [Run.open(file.parent).checkpoints.read("last")[1]["step"] for file in tmp_path.glob("pool/*/recipe.yaml")]
    assert steps
    assert min(steps) > 0
    assert study(asked, out=tmp_path, seeds=1).failures == {}


def test_no_cluster_is_one_sentence(tmp_path):
    with pytest.raises(RunError, match=r"^There is no Ray cluster at '127\.0\.0\.1:1': "):
        study(tiny_study(), out=tmp_path, ray="127.0.0.1:1")
