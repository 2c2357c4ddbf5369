"""Which rank has ended the trainer, and why."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrl.job.trainer_end import (
    RankFailure,
    find_first_failure,
    find_hang,
    has_lacked_memory,
    is_gpu_fault,
    is_lost_peer,
    report_rank_failure,
)
from hpcrl.system.exit_codes import EXIT_OUT_OF_MEMORY, encode_exit_code
from hpcrl.system.files import read_error_line

LOST = "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Connection closed by peer [10.0.0.7]:1"
NCCL_LOST = "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error"
KILLED = encode_exit_code(-signal.SIGKILL)
ABORTED = encode_exit_code(-signal.SIGABRT)


def write_log(*failures: RankFailure) -> str:
    return "".join(f"{report_rank_failure(failure)}\nsrun: error: n1: task 0: Exited\n" for failure in failures)


def find(*failures: RankFailure, **errors: str) -> int | None:
    found = find_first_failure(write_log(*failures), lambda rank: errors.get(f"rank_{rank}", LOST))
    return found.rank if found else None


def test_the_rank_that_failed_by_itself_is_found_whichever_step_ends_first() -> None:
    own, other = RankFailure(9, 1), RankFailure(0, 1)
    assert find(own, other, rank_9="ValueError: x") == 9
    assert find(other, own, rank_9="ValueError: x", rank_0=NCCL_LOST) == 9
    assert find(other, own) == 0, "all have lost the others: the first is named"
    assert find() is None


def test_a_rank_that_was_killed_counts_whatever_its_log_has_of_an_earlier_start() -> None:
    assert find(RankFailure(0, 1), RankFailure(9, KILLED)) == 9
    assert find(RankFailure(0, ABORTED), RankFailure(9, 1), rank_9="ValueError: x") == 9, "NCCL aborts a rank itself"


def test_memory_counts_whichever_step_ends_first() -> None:
    assert has_lacked_memory(write_log(RankFailure(0, 1), RankFailure(9, EXIT_OUT_OF_MEMORY)))
    assert has_lacked_memory("srun: error: n2: task 0: Out Of Memory\n")
    assert not has_lacked_memory(write_log(RankFailure(0, 1), RankFailure(4, KILLED)))


def test_a_hang_is_found_before_the_failures_that_follow_from_it() -> None:
    hang = "process 7 was ended: it has stood still for 5 s; its stacks are in its log"
    assert find_hang(f"{hang}\n{write_log(RankFailure(0, 1))}") == hang
    assert find_hang(write_log(RankFailure(0, 1))) == ""


@pytest.mark.parametrize(
    "error",
    [
        "RuntimeError: AcceleratorError: CUDA error: uncorrectable ECC error encountered",
        "RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable",
        "RuntimeError: No CUDA GPUs are available",
        "RuntimeError: HIP error: uncorrectable ECC error encountered",
    ],
)
def test_errors_of_gpus_are_not_the_programs(error: str) -> None:
    assert is_gpu_fault(error)
    assert not is_lost_peer(error)


@pytest.mark.parametrize(
    "error",
    [
        "RuntimeError: CUDA error: device-side assert triggered",
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB",
        "RuntimeError: CUDA error: no kernel image is available for execution on the device",
        "ValueError: no reward",
    ],
)
def test_errors_that_a_program_can_cause_are_not_blamed_on_gpus(error: str) -> None:
    assert not is_gpu_fault(error)
    assert not is_lost_peer(error)


RANK = """
import os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
rank = int(sys.argv[1])
log = os.open(f"train-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
os.dup2(log, 1), os.dup2(log, 2)
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
dist.all_reduce(torch.ones(1))
if rank == 1:
    raise RuntimeError(
        "CUDA error: uncorrectable ECC error encountered\\n"
        "CUDA kernel errors might be asynchronously reported at some other API call.\\n"
        "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\\n"
    )
dist.all_reduce(torch.ones(1))
"""


def test_of_real_ranks_on_two_nodes_the_one_that_failed_by_itself_is_found(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environ = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONPATH": os.pathsep.join(sys.path)}
    with (tmp_path / "train-step").open("ab") as log:
        steps = [
            subprocess.Popen(
                [sys.executable, "-m", "hpcrl.job.ranks", "2", first, "1", sys.executable, "-c", RANK],
                cwd=tmp_path,
                env=environ,
                stdout=log,
                stderr=log,
            )
            for first in "01"
        ]
        assert [step.wait(timeout=120) for step in steps] == [1, 1]
    step_log = (tmp_path / "train-step").read_text()
    assert sorted(step_log.splitlines()) == [report_rank_failure(RankFailure(rank, 1)) for rank in (0, 1)]
    errors = [read_error_line(tmp_path / f"train-{rank}") for rank in (0, 1)]
    assert [is_lost_peer(error) for error in errors] == [True, False], errors
    assert errors[1] == "RuntimeError: CUDA error: uncorrectable ECC error encountered"
    assert find_first_failure(step_log, errors.__getitem__) == (1, 1)
