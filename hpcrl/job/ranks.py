"""The ranks of one step on a node: `python -m hpcrl.job.ranks SIZE FIRST NUM COMMAND...` starts NUM of SIZE.

Each gets RANK, WORLD_SIZE and LOCAL_RANK as from torchrun, and its rank as the last argument. Where several run a role,
what it needs is imported once and they are forked. When one fails the others are ended too: they would wait for it
forever. The exit code is special if the kernel ended a rank because the memory of its control group was used up, or if
one stood still or did not work and was ended. A line names the rank that failed: those on other nodes fail then too.
"""

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import time
from types import FrameType

from hpcrl.job.fork_server import ROLES_PROGRAM, is_fork_safe
from hpcrl.job.trainer_end import RankFailure, report_rank_failure
from hpcrl.system.exit_codes import EXIT_DONE, EXIT_DRAINED, EXIT_HUNG, EXIT_OUT_OF_MEMORY, encode_exit_code
from hpcrl.system.memory import KillWatch
from hpcrl.system.processes import die_with_parent
from hpcrl.system.pulse import PULSE_WATCH_INTERVAL_S, PulseWatch, end_silent

RANK_POLL_INTERVAL_S = 0.1
SUCCESS_CODES = (EXIT_DONE, EXIT_DRAINED)
ROLE_WORDS = ["-m", "hpcrl.roles"]


class ForkedRank:
    """A rank that this process has forked, with what `subprocess.Popen` has of a child."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self) -> int | None:
        return self._wait(0)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode


StartedRank = ForkedRank | subprocess.Popen[bytes]


def main(size: int, first: int, num: int, command: list[str]) -> int:
    """Start the ranks, forward signals; return the first exit code of a failed rank, else that of the first rank."""
    kills = KillWatch()
    start = _fork_rank if num > 1 and _import_role(command) else _start_rank
    ranks = [start(command, _name_place(rank=first + local, local=local, size=size)) for local in range(num)]

    def forward(number: int, _: FrameType | None) -> None:
        for rank in ranks:
            rank.send_signal(number)

    for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        signal.signal(sig, forward)
    parent, pulses = os.getppid(), PulseWatch()
    next_look, has_hung = 0.0, False
    while any(rank.poll() is None for rank in ranks) and not any(_failure_code(rank) for rank in ranks):
        if os.getppid() != parent:  # the step was killed
            break
        if time.monotonic() >= next_look:
            next_look = time.monotonic() + PULSE_WATCH_INTERVAL_S
            has_hung = _end_silent_ranks(pulses)
        time.sleep(RANK_POLL_INTERVAL_S)
    code, failed = ranks[0].returncode or 0, next(filter(_failure_code, ranks), None)
    if failed is not None:
        code = _failure_code(failed)
        if code == -signal.SIGKILL and kills.has_killed():
            code = EXIT_OUT_OF_MEMORY
        code = encode_exit_code(EXIT_HUNG if has_hung else code)
        print(report_rank_failure(RankFailure(first + ranks.index(failed), code)), flush=True)  # noqa: T201
    _end_ranks(ranks)
    return encode_exit_code(code)


def _end_silent_ranks(pulses: PulseWatch) -> bool:
    """End a rank that stands still or does not work, after it has written its stacks; return whether there was one."""
    silent = pulses.look()
    for rank in silent:
        print(f"process {rank.pid} was ended: {rank.reason}; its stacks are in its log", flush=True)  # noqa: T201
        end_silent(rank.pid)
    return bool(silent)


def _name_place(*, rank: int, local: int, size: int) -> dict[str, str]:
    return {"RANK": str(rank), "LOCAL_RANK": str(local), "WORLD_SIZE": str(size), "PARSL_WORKER_RANK": str(local)}


def _import_role(command: list[str]) -> bool:
    """Import what the role needs that is the command, if it is one; return whether ranks can be forked then."""
    if command[:3] != [sys.executable, *ROLE_WORDS]:
        return False
    role, campaign = command[3:5]
    with contextlib.suppress(Exception):  # the ranks meet it again, and report it in their logs
        importlib.import_module(ROLES_PROGRAM).import_role(campaign, role)
    return is_fork_safe()


def _fork_rank(command: list[str], place: dict[str, str]) -> StartedRank:
    if pid := os.fork():
        return ForkedRank(pid)
    die_with_parent(signal.SIGKILL)
    os.environ.update(place)
    sys.argv = [ROLES_PROGRAM, *command[3:], place["RANK"]]
    importlib.import_module(ROLES_PROGRAM).run_step()
    sys.exit()


def _start_rank(command: list[str], place: dict[str, str]) -> StartedRank:
    words = [*command, place["RANK"]]
    return subprocess.Popen(words, env=os.environ | place, preexec_fn=lambda: die_with_parent(signal.SIGKILL))


def _failure_code(rank: StartedRank) -> int:
    """Return the exit code of a failed rank; 0 if it runs, or if training was done or drained."""
    code = rank.poll()
    return code if code is not None and code not in SUCCESS_CODES else 0


def _end_ranks(ranks: list[StartedRank]) -> None:
    """Kill what is left: a rank takes SIGTERM for the start of a grace time."""
    for rank in ranks:
        rank.kill()
        rank.wait()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]))
