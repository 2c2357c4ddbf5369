"""What the start of a worker costs: `python -m bench.starts`.

CPU time, user and system, of a process that imports what a worker of a role needs, against one that imports torch; the
least of several runs each, in turns, with all bytecode compiled. Roles import with the collector paused, as in a
campaign; the trainer and the engine that is embedded are also compared with themselves without that. Both import
transformers, with what its models import: torch._dynamo and DTensor. These processes end at once; the last row compares
a trainer that ends as its step does with one that ends with the teardown of the interpreter.
"""

import os
import sys
import tempfile

from bench.figures import Figure, main

BAR_TORCH_ROLE = 3.0
BAR_LIGHT_ROLE = 0.6
BAR_WITHOUT = 0.95
"""The most that a start costs of what it costs as in any other program."""

TORCH_ROLES = {
    "trainer": "hpcrl.roles.train",
    "embedded engine": "hpcrl.roles.serve, hpcrl.engines.embedded.engine",
}
LIGHT_ROLES = {
    "simulated engine": "hpcrl.roles.serve, hpcrl.engines.sim.engine",
    "env": "hpcrl.roles.env",
    "reward": "hpcrl.roles.reward",
    "courier": "hpcrl.weights.couriers.__main__",
    "guardian": "hpcrl.job.guardian",
    "driver": "hpcrl.job.driver, hpcrl.job.executors",
}
PAUSED = """
from hpcrl.system.garbage import pause_collection
with pause_collection():
    import {modules}
"""
AT_ONCE = "\nimport os; os._exit(0)"
AS_STEP = """
from hpcrl.roles.__main__ import QuickExit
quick_exit = QuickExit()
{start}
quick_exit.code = 0
"""


def measure(full: bool) -> list[Figure]:
    paused = {role: PAUSED.format(modules=modules) for role, modules in (TORCH_ROLES | LIGHT_ROLES).items()}
    programs = {
        "torch": f"import torch{AT_ONCE}",
        **{role: f"{start}{AT_ONCE}" for role, start in paused.items()},
        **{f"{role}, collecting": f"import {modules}{AT_ONCE}" for role, modules in TORCH_ROLES.items()},
        "step": AS_STEP.format(start=paused["trainer"]),
        "teardown": paused["trainer"],
    }
    with tempfile.TemporaryDirectory() as bytecode:
        least_s = _measure_cpu_s(programs, num_runs=12 if full else 5, bytecode=bytecode)
    bars = dict.fromkeys(TORCH_ROLES, BAR_TORCH_ROLE) | dict.fromkeys(LIGHT_ROLES, BAR_LIGHT_ROLE)
    collecting = [(role, least_s[role] / least_s[f"{role}, collecting"]) for role in TORCH_ROLES]
    return [
        Figure(name="import torch, CPU time", value=least_s["torch"], unit="s"),
        *(_make_figure(f"{role} / import torch", least_s[role] / least_s["torch"], bar) for role, bar in bars.items()),
        *(_make_figure(f"{role}, collector paused / not", ratio, BAR_WITHOUT) for role, ratio in collecting),
        _make_figure("trainer, start and end, as a step / not", least_s["step"] / least_s["teardown"], BAR_WITHOUT),
    ]


def _make_figure(name: str, value: float, bar: float) -> Figure:
    return Figure(name=name, value=value, bar=bar, better="lower")


def _measure_cpu_s(programs: dict[str, str], *, num_runs: int, bytecode: str) -> dict[str, float]:
    """Return the least CPU time of each program; the first run of each only compiles."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environ["PYTHONPYCACHEPREFIX"] = bytecode
    least_s = dict.fromkeys(programs, float("inf"))
    for number in range(1 + num_runs):
        for name, program in programs.items():
            cpu_s = _run(program, environ)
            if number:
                least_s[name] = min(least_s[name], cpu_s)
    return least_s


def _run(program: str, environ: dict[str, str]) -> float:
    pid = os.posix_spawn(sys.executable, [sys.executable, "-c", program], environ)
    _, status, usage = os.wait4(pid, 0)
    if status:
        raise RuntimeError(f"a process that was to be measured ended with status {status}:\n{program}")
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    sys.exit(main("starts", measure))
