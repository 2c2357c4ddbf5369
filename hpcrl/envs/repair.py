"""Mend a small Python function, with a tool that really runs what it is given; the reward is a real test run.

    Repair         shows a broken function; `run CODE` runs Python with it, `fix CODE` hands in the mended one
    mended         a reward function: runs the tests again on what was handed in last, apart from the episode
    run_python     the tool: a process of its own with limits, inside walls where there are any

Code of a model is run in a process with a deadline, limits on memory and output, no network and nothing to write to
but its own directory (hpcrl.envs.isolation.sandbox); where no sandbox is available nothing is run, unless
`sandbox = "none"` allows it.
"""

import asyncio
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING, NamedTuple

from hpcrl.envs.base import Step
from hpcrl.envs.isolation.sandbox import Walls, Wanted, choose, readable, walled

if TYPE_CHECKING:  # it needs numpy
    from hpcrl.spool.record import Trajectory

RUN_S = 10.0
MAX_SHOWN = 400
"""Characters of a tool's output that the model is shown."""
INVALID_COST = 0.05
_FIX = re.compile(r"fix\s+(?:```(?:python)?\n)?(?P<code>.*?)(?:```|<\||\Z)", re.DOTALL | re.IGNORECASE)
_LIMITED = """import resource, sys
resource.setrlimit(resource.RLIMIT_DATA, (512 << 20, 512 << 20))
resource.setrlimit(resource.RLIMIT_CPU, (10, 10))
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
exec(compile(sys.stdin.read(), "code", "exec"), {"__name__": "__main__"})
"""


class Fault(NamedTuple):
    """A function, what is wrong with it, and how that shows."""

    right: str
    broken: str
    tests: str


FAULTS = (
    Fault(
        "def f(a, b):\n    return a + b",
        "def f(a, b):\n    return a - b",
        "assert f(2, 3) == 5\nassert f(-1, 1) == 0",
    ),
    Fault(
        "def f(x):\n    return x[::-1]",
        "def f(x):\n    return x[::1]",
        "assert f('abc') == 'cba'\nassert f([1, 2]) == [2, 1]",
    ),
    Fault(
        "def f(n):\n    return sum(range(n + 1))",
        "def f(n):\n    return sum(range(n))",
        "assert f(3) == 6\nassert f(0) == 0",
    ),
    Fault(
        "def f(x):\n    return max(x)",
        "def f(x):\n    return min(x)",
        "assert f([1, 3, 2]) == 3\nassert f([-1]) == -1",
    ),
    Fault(
        "def f(n):\n    return n % 2 == 0",
        "def f(n):\n    return n % 2 == 1",
        "assert f(2) and f(0)\nassert not f(3)",
    ),
)


def fault_of(seed: int) -> Fault:
    """The task of a seed."""
    return random.Random(seed).choice(FAULTS)


def run_python(code: str, *, sandbox: Wanted = "auto") -> tuple[bool, str]:
    """Whether code ran to its end without an error, and the end of what it printed."""
    kind = choose(sandbox, image=None)
    with tempfile.TemporaryDirectory(prefix="hpcrl-run-", ignore_cleanup_errors=True) as workdir:
        walls = Walls(kind=kind, workdir=workdir, readable=readable())
        command = walled([sys.executable, "-I", "-c", _LIMITED], walls)
        with tempfile.TemporaryFile(dir=workdir) as printed:  # bounded by RLIMIT_FSIZE, whatever the code prints
            process = subprocess.Popen(
                command, cwd=workdir, stdin=subprocess.PIPE, stdout=printed, stderr=printed, start_new_session=True
            )
            ended = _feed(process, code)
            printed.seek(0, 2)
            printed.seek(max(printed.tell() - 4 * MAX_SHOWN, 0))
            said = printed.read().decode(errors="replace").strip()
    return ended and process.returncode == 0, said[-MAX_SHOWN:] if ended else f"no end in {RUN_S:g} s"


def mended(trajectory: "Trajectory", *, text: str, sandbox: Wanted = "auto") -> float:
    """1 if what was handed in last passes the tests of the task, else 0."""
    handed_in = [match["code"] for match in _FIX.finditer(text)]
    return float(bool(handed_in) and _passes(handed_in[-1], fault_of(trajectory.seed), sandbox=sandbox))


class Repair:
    """Find out what is wrong with `f` and hand in a better one.

    sandbox    "auto" (apptainer, else bubblewrap, else nothing is run), or "none": this code may run unguarded
    """

    def __init__(self, *, sandbox: Wanted = "auto") -> None:
        self._sandbox: Wanted = sandbox

    async def reset(self, seed: int) -> str:
        self._fault = fault_of(seed)
        return f"{self._fault.broken}\n{self._fault.tests.splitlines()[0]}"

    async def step(self, action: str) -> Step:
        tool, _, code = action.strip().partition(" ")
        match tool.lower():
            case "run":
                program = f"{self._fault.broken}\n{code}"
                _, said = await asyncio.to_thread(run_python, program, sandbox=self._sandbox)
                return Step(observation=said or "(no output)")
            case "fix":
                passed = await asyncio.to_thread(_passes, code, self._fault, sandbox=self._sandbox)
                return Step(observation="passed" if passed else "failed", reward=float(passed), done=True)
            case _:
                return Step(observation="say run CODE or fix CODE", reward=-INVALID_COST)

    async def close(self) -> None:
        """Nothing to end: what is run ends within its step."""


def _passes(code: str, fault: Fault, *, sandbox: Wanted) -> bool:
    return run_python(f"{code}\n{fault.tests}", sandbox=sandbox)[0]


def _feed(process: "subprocess.Popen[bytes]", code: str) -> bool:
    """Give a process its program; False if it had to be ended, with all that it started."""
    try:
        process.communicate(code.encode(errors="replace"), timeout=RUN_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return False
    return True
