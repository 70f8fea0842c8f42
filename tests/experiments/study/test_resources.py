"""What a run on a cluster is given, and where the cluster is: no cluster is needed for that."""

import socket

import pytest

from vitclinic._core.errors import RecipeError, RunError
from vitclinic.experiments.ray_cluster import _knock, choose_resources
from vitclinic.experiments.ray_machines import parse_address
from vitclinic.experiments.slurm import describe_job
from vitclinic.experiments.study.conduct import study

from .networks import tiny_study

WITH_GPUS, WITHOUT = {"CPU": 8.0, "GPU": 2.0}, {"CPU": 16.0, "memory": 1e9}


@pytest.mark.parametrize(
    ("machines", "cores", "gpus", "given"),
    [
        ([WITHOUT], 1, None, (1, 0)),
        ([WITHOUT, WITH_GPUS], 1, None, (1, 1)),
        ([WITHOUT, WITH_GPUS], 12, None, (12, 0)),  # those with GPUs are too small
        ([WITHOUT, WITH_GPUS], 4, 2, (4, 2)),
        ([WITHOUT, WITH_GPUS], 4, 0, (4, 0)),
    ],
)
def test_a_run_is_given_a_gpu_where_there_is_one(machines, cores, gpus, given):
    assert tuple(choose_resources(machines, cores, gpus).values()) == given


@pytest.mark.parametrize(("machines", "cores", "gpus"), [([WITHOUT], 1, 1), ([WITH_GPUS], 9, 0), ([], 1, None)])
def test_what_no_machine_has_is_not_waited_for(machines, cores, gpus):
    with pytest.raises(RunError, match=rf"^No machine of the Ray cluster has {cores} cores and {gpus or 0} GPUs"):
        choose_resources(machines, cores, gpus)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("[::1]:6379", ("::1", 6379)),
        ("ray://[fe80::1]:10001", ("fe80::1", 10001)),
        ("10.0.0.7:6379", ("10.0.0.7", 6379)),
        ("head.example:6379", ("head.example", 6379)),
        ("auto", None),
    ],
)
def test_addresses(text, place):
    assert parse_address(text) == place


@pytest.mark.parametrize("text", ["::1:6379", "host:port", "host:", "host:0", "host:99999999"])
def test_addresses_that_are_none(text):
    with pytest.raises(ValueError, match=r"not a port|in brackets"):
        parse_address(text)


@pytest.mark.skipif(not socket.has_ipv6, reason="there is no IPv6 here")
def test_somebody_answers_at_an_ipv6_address():
    with socket.socket(socket.AF_INET6) as server:
        try:
            server.bind(("::1", 0))
        except OSError:
            pytest.skip("there is no IPv6 loopback here")
        server.listen()
        _knock(f"[::1]:{server.getsockname()[1]}")


def test_a_job_has_what_is_asked_for():
    job = describe_job("partition=gpu", 8, 2)
    assert (job["cpus_per_task"], job["gpus_per_node"], job["slurm_partition"]) == (8, 2, "gpu")
    assert "gpus_per_node" not in describe_job("auto", 1, None)
    assert describe_job("gpus=2", 1, 2)["gpus_per_node"] == 2
    with pytest.raises(RecipeError, match="say it once"):
        describe_job("gpus=2", 1, 1)


@pytest.mark.parametrize("asked", [{"cores": 2}, {"gpus": 0}])
def test_cores_and_gpus_are_a_cluster_s(tmp_path, asked):
    with pytest.raises(RecipeError, match="on a cluster"):
        study(tiny_study(), out=tmp_path, **asked)
