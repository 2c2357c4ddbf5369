"""Fix a small Python function, with a tool that really runs code; the reward is a real test run.

    Repair         shows a broken function; `run CODE` runs Python with it, `fix CODE` submits a fixed one
    rerun_tests    a reward function: run the tests again on the last submission, apart from the episode
    run_python     the tool: a separate process with limits, in a sandbox
    BrokenFunction, BROKEN_FUNCTIONS, draw_broken_function  the tasks
    RUN_TIMEOUT_S, MAX_SHOWN_CHARS  constants

Code of a model runs in a process with a deadline, limits on memory and output, no network, and only its own directory
to write to (hpcrl.envs.isolation.sandbox). Without a sandbox nothing is run, unless `sandbox = "none"` allows it.
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

from hpcrl.envs.base import INVALID_COST, Step
from hpcrl.envs.isolation.sandbox import SandboxChoice, SandboxSpec, choose_sandbox, list_readable_paths, wrap_command

if TYPE_CHECKING:  # it needs numpy
    from hpcrl.spool.record import Trajectory

RUN_TIMEOUT_S = 10.0
MAX_SHOWN_CHARS = 400
"""The number of characters of a tool's output that the model is shown."""
_FIX = re.compile(r"fix\s+(?:```(?:python)?\n)?(?P<code>.*?)(?:```|<\||\Z)", re.DOTALL | re.IGNORECASE)
_LIMITED_PROGRAM = """import resource, sys
resource.setrlimit(resource.RLIMIT_DATA, (512 << 20, 512 << 20))
resource.setrlimit(resource.RLIMIT_CPU, (10, 10))
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
exec(compile(sys.stdin.read(), "code", "exec"), {"__name__": "__main__"})
"""


class BrokenFunction(NamedTuple):
    """A function, a broken form of it, and the tests that show it."""

    right: str
    broken: str
    tests: str


BROKEN_FUNCTIONS = (
    BrokenFunction(
        "def f(a, b):\n    return a + b",
        "def f(a, b):\n    return a - b",
        "assert f(2, 3) == 5\nassert f(-1, 1) == 0",
    ),
    BrokenFunction(
        "def f(x):\n    return x[::-1]",
        "def f(x):\n    return x[::1]",
        "assert f('abc') == 'cba'\nassert f([1, 2]) == [2, 1]",
    ),
    BrokenFunction(
        "def f(n):\n    return sum(range(n + 1))",
        "def f(n):\n    return sum(range(n))",
        "assert f(3) == 6\nassert f(0) == 0",
    ),
    BrokenFunction(
        "def f(x):\n    return max(x)",
        "def f(x):\n    return min(x)",
        "assert f([1, 3, 2]) == 3\nassert f([-1]) == -1",
    ),
    BrokenFunction(
        "def f(n):\n    return n % 2 == 0",
        "def f(n):\n    return n % 2 == 1",
        "assert f(2) and f(0)\nassert not f(3)",
    ),
)


def draw_broken_function(seed: int) -> BrokenFunction:
    """Return the task of a seed."""
    return random.Random(seed).choice(BROKEN_FUNCTIONS)


def run_python(code: str, *, sandbox: SandboxChoice = "auto") -> tuple[bool, str]:
    """Run code; returns whether it ended without an error, and the end of its output."""
    kind = choose_sandbox(sandbox, image=None)
    with tempfile.TemporaryDirectory(prefix="hpcrl-run-", ignore_cleanup_errors=True) as workdir:
        spec = SandboxSpec(kind=kind, workdir=workdir, readable=list_readable_paths())
        command = wrap_command([sys.executable, "-I", "-c", _LIMITED_PROGRAM], spec)
        with tempfile.TemporaryFile(dir=workdir) as printed:  # bounded by RLIMIT_FSIZE, whatever the code prints
            process = subprocess.Popen(
                command, cwd=workdir, stdin=subprocess.PIPE, stdout=printed, stderr=printed, start_new_session=True
            )
            ended = _run_to_end(process, code)
            printed.seek(0, 2)
            printed.seek(max(printed.tell() - 4 * MAX_SHOWN_CHARS, 0))
            output = printed.read().decode(errors="replace").strip()
    return ended and process.returncode == 0, output[-MAX_SHOWN_CHARS:] if ended else f"no end in {RUN_TIMEOUT_S:g} s"


def rerun_tests(trajectory: "Trajectory", *, text: str, sandbox: SandboxChoice = "auto") -> float:
    """Return 1 if the last submission passes the tests of the task, else 0."""
    fixes = [match["code"] for match in _FIX.finditer(text)]
    return float(bool(fixes) and _passes_tests(fixes[-1], draw_broken_function(trajectory.seed), sandbox=sandbox))


class Repair:
    """A broken function `f`, to be understood and fixed.

    sandbox    "auto" (apptainer, else bubblewrap, else nothing is run), or "none": code may run without a sandbox
    """

    def __init__(self, *, sandbox: SandboxChoice = "auto") -> None:
        self._sandbox: SandboxChoice = sandbox

    async def reset(self, seed: int) -> str:
        self._function = draw_broken_function(seed)
        return f"{self._function.broken}\n{self._function.tests.splitlines()[0]}"

    async def step(self, action: str) -> Step:
        tool, _, code = action.strip().partition(" ")
        match tool.lower():
            case "run":
                program = f"{self._function.broken}\n{code}"
                _, output = await asyncio.to_thread(run_python, program, sandbox=self._sandbox)
                return Step(observation=output or "(no output)")
            case "fix":
                passed = await asyncio.to_thread(_passes_tests, code, self._function, sandbox=self._sandbox)
                return Step(observation="passed" if passed else "failed", reward=float(passed), done=True)
            case _:
                return Step(observation="say run CODE or fix CODE", reward=-INVALID_COST)

    async def close(self) -> None:
        """Do nothing: code that is run ends within its step."""


def _passes_tests(code: str, function: BrokenFunction, *, sandbox: SandboxChoice) -> bool:
    return run_python(f"{code}\n{function.tests}", sandbox=sandbox)[0]


def _run_to_end(process: "subprocess.Popen[bytes]", code: str) -> bool:
    """Send a process its program and wait; returns False if it and its children had to be killed."""
    try:
        process.communicate(code.encode(errors="replace"), timeout=RUN_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return False
    return True
