"""Rewards computed in processes that can be killed: many at a time, each within its domain's `reward_timeout_s`.

    RewardProcess   the process of a worker that scores segments; the worker sends paths and receives scores
    SegmentScores   its answer: a score for each trajectory of a segment
    CLOSE_GRACE_S   the time that it has to end

The process imports the reward functions once, runs none of them itself, and forks the children that do
(`hpcrl.rollout.reward_calls`). It ends with all of them when its worker closes the connection, or ends for any reason.
"""

import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from hpcrl.envs.process import SINGLE_THREAD_VARIABLES
from hpcrl.errors import RewardError
from hpcrl.rollout.rewards import RewardScore
from hpcrl.system.processes import end_group
from hpcrl.system.wakeups import WakeListener, wait_readable

CLOSE_GRACE_S = 2.0


class SegmentScores(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The scores of one segment, in the order of its trajectories."""

    segment: str
    """The path of the segment, as it was requested."""
    scores: list[RewardScore | None] = []
    """None for a trajectory that cannot be trained on."""
    teacher: list[RewardScore | None] = []
    """The log-probs by a teacher's engine, for each trajectory that can be trained on; empty if none is asked."""
    error: str = ""
    """The reason why the segment could not be read."""


class RewardProcess:
    """The process that scores segments for one worker; it is started by the first request, and again if it ended."""

    def __init__(self, campaign: Path, *, concurrency: int, num_cpus: int, teacher: str = "") -> None:
        """`teacher`: the name of the judge that also scores the tokens of each trajectory."""
        self._command = [
            *(sys.executable, "-m", "hpcrl.rollout.reward_calls"),
            *(str(campaign), str(concurrency), str(num_cpus), teacher),
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._received = b""
        self._requested: set[str] = set()
        """The segments that it has not answered."""

    def request(self, segment: Path) -> None:
        """Request the scores of a segment, unless that was done; raise RewardError if the process has ended."""
        if self._connection is None:
            self._start()
        assert self._connection is not None
        if str(segment) in self._requested:
            return
        self._requested.add(str(segment))
        try:
            self._connection.sendall(msgspec.json.encode(str(segment)) + b"\n")
        except OSError:
            raise self._explain_end() from None

    def receive(self, timeout_s: float, *, wake: WakeListener | None = None) -> SegmentScores | None:
        """Return the next scores; None if there are none in time, or when another process has sent a wake-up.

        RewardError if the process has ended. Without a request there is none, and only the wait.
        """
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._received:
            fds = [source.fileno() for source in (self._connection, wake) if source is not None]
            ready = wait_readable(fds, max(deadline - time.monotonic(), 0.0))
            if wake is not None and wake.fileno() in ready:
                wake.receive()
            if self._connection is None or self._connection.fileno() not in ready:
                return None
            with contextlib.suppress(OSError):
                if data := self._connection.recv(1 << 16):
                    self._received += data
                    continue
            raise self._explain_end()
        line, _, self._received = self._received.partition(b"\n")
        answer = msgspec.json.decode(line, type=SegmentScores)
        self._requested.discard(answer.segment)
        return answer

    def close(self) -> None:
        """End the process and all its children."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(CLOSE_GRACE_S)
            end_group(self._process, grace_s=0.0)
        self._connection = self._process = None
        self._received = b""
        self._requested.clear()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [*self._command, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env=os.environ | SINGLE_THREAD_VARIABLES | {"TOKENIZERS_PARALLELISM": "false"},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._connection = ours

    def _explain_end(self) -> RewardError:
        process = self._process
        self.close()
        code = None if process is None else process.returncode
        return RewardError(f"the process that computes rewards ended (code {code}): the worker's log has its output")
