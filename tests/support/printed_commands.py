"""The shell lines that pages and the help print, and which of them are not run as printed, with the reason.

list_printed      the lines by page, and by the command whose help has them as examples
list_runnable     those of a page that are run on a finished campaign
NOT_RUN           all others
"""

import re
from pathlib import Path

from hpcrl.commands.examples import EXAMPLES
from tests.support.doc_blocks import find_blocks

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMENT = re.compile(r"(?:^|\s+)#.*$")

NOT_RUN: dict[str, tuple[str, ...]] = {
    "installs packages, or makes the environment in which the tests run": (
        "make demo",
        "make test",
        "make vllm",
        "make install",
        "source .venv/bin/activate",
        "apt-get install --no-install-recommends slurm-wlm slurmdbd munge mariadb-server libpmix-dev",
        "python -m venv agent && agent/bin/pip install mini-swe-agent pytest",
        "python -m venv /project/me/hpcrl",
        "source /project/me/hpcrl/bin/activate",
        "pip install '.[gpu]'",
    ),
    "fetches from the network, which tests/unit/staging imitates": (
        "hpcrl stage RECIPE --site NAME",
        "hpcrl stage my-first.toml --site mycluster",
        "hpcrl stage qwen3-8b-math --site my-perlmutter",
        "hpcrl stage my/recipe.toml --site perlmutter",
        "hpcrl stage quickstart --site local -s model.path=Qwen/Qwen3-0.6B",
        "hpcrl image --site perlmutter --wheel dist/hpcrl-0.1.0-py3-none-any.whl --build",
    ),
    "starts or ends a lab, or asks one: tests/slurm": (
        ".venv/bin/hpcrl lab up",
        ".venv/bin/hpcrl lab down",
        ".venv/bin/hpcrl submit recipes/quickstart.toml --site lab --watch",
        "hpcrl lab up",
        "hpcrl lab down",
        'eval "$(hpcrl lab env)"',
        "sinfo",
        "hpcrl submit quickstart --site lab",
        "hpcrl lab up --like frontier",
        "hpcrl lab up --like mycluster",
        "hpcrl submit quickstart --site /tmp/hpcrl-lab-0/site.toml --watch",
        "HPCRL_LAB=/tmp/second hpcrl lab up",
        "hpcrl lab status",
        "hpcrl lab break env1",
        "hpcrl doctor --site lab --job",
        "hpcrl extend lab-1 --steps 44",
        "hpcrl submit my/recipe.toml --site lab --name mine -s rollout.group_size=16",
    ),
    "asks the Slurm of a cluster: tests/slurm asks the lab": (
        "hpcrl submit quickstart --site perlmutter -s site.account=m1234 --dry-run",
        "hpcrl site new mycluster --detect",
        "hpcrl site new NAME --detect",
        "hpcrl doctor --site mycluster",
        "hpcrl doctor --site mycluster --job",
        "hpcrl doctor --site NAME",
        "hpcrl doctor --site NAME --job",
        "hpcrl doctor --site my-perlmutter",
        "hpcrl submit quickstart --site mycluster --dry-run",
        "hpcrl submit quickstart --site NAME --dry-run",
        "hpcrl submit quickstart --site mycluster -s job.layout=colocated --dry-run",
        "hpcrl submit quickstart --site mycluster -s job.layout=colocated --watch",
        "hpcrl submit my-first.toml --site mycluster --watch",
        "hpcrl submit qwen3-8b-math --site my-perlmutter --dry-run",
        "hpcrl submit qwen3-8b-math --site my-perlmutter --name math -s limits.node_hours=100",
    ),
    "runs a campaign: other tests of tests/e2e, and tests/vllm": (
        "hpcrl submit quickstart --site local --watch",
        ".venv/bin/hpcrl submit recipes/quickstart-vllm.toml --site local --watch",
        "hpcrl resume NAME -s job.walltime_min=240 --watch",
        "hpcrl resume NAME --accept",
        "hpcrl extend NAME --steps 300 --jobs 3",
        "hpcrl resume math",
        "hpcrl resume math -s job.walltime_min=240",
        "hpcrl extend math --steps 300 --jobs 3",
        "hpcrl resume quickstart-1 --watch",
        "hpcrl resume quickstart-1 -s train.learning_rate=1e-6 -s job.walltime_min=120",
        "hpcrl extend quickstart-1 --steps 80",
        "hpcrl extend quickstart-1 --jobs 2",
        "hpcrl submit my-agent.toml --site local --watch",
        "hpcrl submit my-maze.toml --site local --watch",
    ),
    "is run with its page: tests/e2e/test_howto_pages.py": (
        "hpcrl try my-agent.toml --domain sums",
        "export PYTHONPATH=$PWD",
        "hpcrl try my-maze.toml",
        "hpcrl try my-reward.toml",
    ),
    "needs agents in another environment: tests/agents": (
        "hpcrl submit code-repair --site local -s \"domains.repair.options.readable=['$PWD/agent']\" "
        '-s "domains.repair.options.environment.PATH=$PWD/agent/bin:/usr/bin:/bin"',
    ),
    "does not end by itself: tests/unit/monitor and tests/unit/commands end it": (
        "hpcrl monitor quickstart-1",
        "hpcrl monitor lab-1",
        "hpcrl monitor math",
        "hpcrl events quickstart-1 --kind fault --kind worker-failed -f",
    ),
    "needs a campaign on GPUs: tests/unit/commands/test_calibration.py makes its events": (
        "hpcrl calibrate my-campaign",
    ),
    "needs a terminal, fish or inspect-ai": (
        "hpcrl rm quickstart-1",
        "hpcrl completion fish | source",
        "inspect view --log-dir logs",
    ),
}


def list_lines(text: str) -> list[str]:
    """Return the lines of shell text, continued ones whole, without comments."""
    lines = [COMMENT.sub("", line).strip() for line in text.replace("\\\n", " ").splitlines()]
    return [re.sub(r"\s+", " ", line) for line in lines if line]


def list_printed() -> dict[str, list[str]]:
    """Return all lines by page, and by command those of the help."""
    printed = {
        str(page.relative_to(ROOT)): [line for block in find_blocks(page, "sh") for line in list_lines(block.text)]
        for page in PAGES
    }
    printed |= {f"hpcrl {name} --help": list(examples) for name, examples in EXAMPLES.items()}
    return {place: lines for place, lines in printed.items() if lines}


def list_runnable(place: str) -> list[str]:
    """Return the lines of a page, or of a command's help, that are run as printed."""
    left_out = {line for lines in NOT_RUN.values() for line in lines}
    return [line for line in list_printed()[place] if line not in left_out]
