"""How fast the command line answers, against the interpreter alone: `python -m bench.cli`."""

import os
import subprocess
import sys
import time

from bench.figures import Figure, main
from hpcrl.config.site import load_site
from hpcrl.plan.plan import make_plan
from hpcrl.testing.recipes import load_recipe

BAR_HELP = 8.0
BAR_PLAN_S = 1.0


def measure(full: bool) -> list[Figure]:
    """The two commands take turns, and the fastest run of each counts: noise only ever adds."""
    commands = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "hpcrl --help": [sys.executable, "-m", "hpcrl.cli", "--help"],
        "hpcrl plan quickstart --site lab --json": [
            *(sys.executable, "-m", "hpcrl.cli", "plan", "quickstart", "--site", "lab", "--json")
        ],
    }
    fastest = dict.fromkeys(commands, float("inf"))
    for _ in range(40 if full else 15):
        for name, command in commands.items():
            fastest[name] = min(fastest[name], _seconds(command))
    bare = fastest["python -c pass"]
    return [
        Figure(
            name="hpcrl --help / python -c pass",
            value=fastest["hpcrl --help"] / bare,
            bar=BAR_HELP,
            better="lower",
        ),
        Figure(name="hpcrl plan --json / python -c pass", value=fastest[list(commands)[2]] / bare, better="lower"),
        Figure(
            name="planning 1,000 nodes / one second",
            value=_plan_seconds() / BAR_PLAN_S,
            bar=1.0,
            better="lower",
        ),
    ]


def _seconds(command: list[str]) -> float:
    started_at = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True, env={**os.environ, "COLUMNS": "80"})
    return time.perf_counter() - started_at


def _plan_seconds() -> float:
    site = load_site("perlmutter", settings=("account=m1",))
    settings = ("resources.env.num_workers=40000", "resources.decode.num_workers=3000", "rollout.max_running=400000")
    started_at = time.perf_counter()
    plan = make_plan(load_recipe("quickstart", settings=settings), site)
    plan.to_json()
    assert sum(component.nodes for component in plan.components) > 1000
    return time.perf_counter() - started_at


if __name__ == "__main__":
    sys.exit(main("cli", measure))
