"""Find why the trainer ended, by what the logs of its steps and ranks have. Pure.

    report_rank_failure    the line of a step's log that names the rank that failed
    find_first_failure     the rank that failed by itself: the others fail because they lose it
    find_hang              the line about a rank that stood still
    has_lacked_memory      whether a rank was ended for its memory, whichever step ended first
    is_gpu_fault           whether an error is one of a GPU or its node
    is_lost_peer           whether an error is only about other ranks, or the network to them
    RankFailure            a rank and its exit code

A failure on one node ends the ranks of all others within a second, and which step is seen to end first is chance.
"""

import re
import signal
from collections.abc import Callable
from typing import NamedTuple

from hpcrl.system.exit_codes import EXIT_OUT_OF_MEMORY, decode_exit_code, encode_exit_code

_RANK_LINE = re.compile(r"^rank (\d+) of the trainer failed with code (\d+)$", re.MULTILINE)
_HANG_LINE = re.compile(r"^process \d+ was ended: .*", re.MULTILINE)
_SRUN_OUT_OF_MEMORY = ": Out Of Memory"
_GPU_FAULTS = (
    "uncorrectable ECC error",
    "uncorrectable NVLink error",
    "device(s) is/are busy or unavailable",
    "no CUDA-capable device is detected",
    "no ROCm-capable device is detected",
    "No CUDA GPUs are available",
    "No HIP GPUs are available",
    "or a hardware error",
    "hardware exception",
    "GPU is lost",
    "has fallen off the bus",
    "system not yet initialized",
)
"""Parts of messages of CUDA, HIP, NVML and torch that no program can cause which works on other nodes."""
_LOST_PEERS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection was likely closed",
    "Broken pipe",
    "remote process exited or there was a network error",
    "unhandled system error",
    "Watchdog caught collective operation timeout",
    "communicator was aborted",
    "Timed out waiting",
)
"""Parts of messages of gloo, NCCL and torch's store about a rank that is gone, or a network."""


class RankFailure(NamedTuple):
    """A rank that failed."""

    rank: int
    code: int
    """Its exit code, or that of its step."""

    @property
    def was_killed(self) -> bool:
        """True if a signal ended it that is not its own: its log may end with the error of an earlier start."""
        return decode_exit_code(self.code) < 0 and self.code != encode_exit_code(-signal.SIGABRT)


def report_rank_failure(failure: RankFailure) -> str:
    """Return the line about a rank that failed."""
    return f"rank {failure.rank} of the trainer failed with code {failure.code}"


def find_first_failure(step_log: str, read_error: Callable[[int], str]) -> RankFailure | None:
    """Return the rank that failed by itself; `read_error(rank)` is the error in its log. None if no step names one."""
    failures = [RankFailure(int(rank), int(code)) for rank, code in _RANK_LINE.findall(step_log)]
    by_themselves = (one for one in failures if one.was_killed or not is_lost_peer(read_error(one.rank)))
    return next(by_themselves, failures[0] if failures else None)


def find_hang(step_log: str) -> str:
    """Return the line about a rank that stood still; empty if there is none."""
    found = _HANG_LINE.search(step_log)
    return found[0] if found else ""


def has_lacked_memory(step_log: str) -> bool:
    """Return whether a step, or srun, reports that the kernel ended a rank for its memory."""
    codes = (int(code) for _, code in _RANK_LINE.findall(step_log))
    return EXIT_OUT_OF_MEMORY in codes or _SRUN_OUT_OF_MEMORY in step_log


def is_gpu_fault(error: str) -> bool:
    """Return whether a GPU, its driver or its node has failed, and not the program."""
    return any(words in error for words in _GPU_FAULTS)


def is_lost_peer(error: str) -> bool:
    """Return whether a rank failed only since others, or the network to them, did."""
    return any(words in error for words in _LOST_PEERS)
