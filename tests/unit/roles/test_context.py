"""The devices that a worker takes of those of its node."""

import os
from collections.abc import Iterator

import pytest

from hpcrl.config.site import DEVICE_VARIABLES, DeviceVariable
from hpcrl.plan.plan import RolePlan
from hpcrl.roles.context import pin_devices

ROLE = RolePlan(
    role="decode",
    component=0,
    num_workers=4,
    workers_per_node=4,
    gpus_per_worker=2,
    cpus_per_worker=1,
    mem_gib_per_worker=1.0,
)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """No variable of devices; whatever a test sets is unset after it, and the cores are set back."""
    for name in (*DEVICE_VARIABLES, "GPU_DEVICE_ORDINAL", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("PARSL_WORKER_RANK", "1")
    cores = os.sched_getaffinity(0)
    yield monkeypatch
    os.sched_setaffinity(0, cores)


@pytest.mark.parametrize(
    ("given", "asked", "pinned"),
    [
        ({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, None, {"CUDA_VISIBLE_DEVICES": "6,7"}),
        ({"ROCR_VISIBLE_DEVICES": "0,1,2,3", "GPU_DEVICE_ORDINAL": "0,1,2,3"}, None, {"ROCR_VISIBLE_DEVICES": "2,3"}),
        (
            {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "ROCR_VISIBLE_DEVICES": "0,1,2,3"},
            "ROCR_VISIBLE_DEVICES",
            {"ROCR_VISIBLE_DEVICES": "2,3"},
        ),
        ({"ROCR_VISIBLE_DEVICES": "0,1,2,3"}, "HIP_VISIBLE_DEVICES", {"HIP_VISIBLE_DEVICES": "2,3"}),
        ({"ZE_AFFINITY_MASK": "0.0,0.1,1.0,1.1"}, None, {"ZE_AFFINITY_MASK": "1.0,1.1"}),
        ({"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-c,GPU-d"}, None, {"CUDA_VISIBLE_DEVICES": "GPU-c,GPU-d"}),
        ({}, None, {"CUDA_VISIBLE_DEVICES": "2,3"}),
        ({}, "HIP_VISIBLE_DEVICES", {"HIP_VISIBLE_DEVICES": "2,3"}),
    ],
)
def test_a_worker_takes_its_share_by_the_variable_that_the_site_uses_and_no_other(
    environment: pytest.MonkeyPatch, given: dict[str, str], asked: DeviceVariable | None, pinned: dict[str, str]
) -> None:
    for name, value in given.items():
        environment.setenv(name, value)
    (value,) = pinned.values()
    assert pin_devices(ROLE, asked) == value.split(",")
    assert {name: os.environ[name] for name in DEVICE_VARIABLES if os.environ.get(name)} == pinned
    assert not os.environ.get("GPU_DEVICE_ORDINAL")


def test_a_worker_uses_the_cores_near_its_own_gpus(environment: pytest.MonkeyPatch) -> None:
    cores = sorted(os.sched_getaffinity(0))
    places = [("", {cores[0]}), ("", {cores[0]}), ("", {cores[-1]}), ("", {cores[-1]})]
    environment.setattr("hpcrl.system.near_cores.list_near_cores", lambda _: places)
    assert pin_devices(ROLE) == ["2", "3"]
    assert os.sched_getaffinity(0) == {cores[-1]}
