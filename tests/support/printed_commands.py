"""The shell lines that pages and the help print: where each is run as printed, and why a few are not.

list_printed      the lines by page, and by the command whose help has them as examples
list_runnable     those of a page that are run on a finished campaign
LAB_SESSIONS, CAMPAIGN_LINES, ENDLESS, AT_TERMINAL, WITH_PAGES, VLLM_LINE    those that are run otherwise
NOT_RUN           all others
list_special      all lines that are not runnable
"""

import re
from pathlib import Path

from hpcrl.commands.examples import EXAMPLES
from tests.support.doc_blocks import find_blocks

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMENT = re.compile(r"(?:^|\s+)#.*$")

LAB_SESSIONS: dict[str, tuple[str, ...]] = {
    "plain": (
        ".venv/bin/hpcrl lab up",
        "hpcrl lab up",
        'eval "$(hpcrl lab env)"',
        "sinfo",
        "hpcrl lab status",
        "hpcrl submit quickstart --site lab",
        "hpcrl extend quickstart-1 --jobs 2",
        "hpcrl stop quickstart-1 --now",
        ".venv/bin/hpcrl submit recipes/quickstart.toml --site lab --watch",
        "hpcrl submit my/recipe.toml --site lab --name mine -s rollout.group_size=16",
        "HPCRL_LAB=/tmp/second hpcrl lab up",
        "hpcrl stop mine --now",
        "hpcrl lab break env1",
        ".venv/bin/hpcrl lab down",
        "hpcrl lab down",
    ),
    "own site": (
        "hpcrl lab up",
        'eval "$(hpcrl lab env)"',
        "hpcrl site new mycluster --detect",
        "hpcrl doctor --site mycluster",
        "hpcrl submit quickstart --site mycluster --dry-run",
        "hpcrl submit quickstart --site mycluster -s job.layout=colocated --dry-run",
        "hpcrl doctor --site mycluster --job",
        "hpcrl submit quickstart --site mycluster -s job.layout=colocated --watch",
        "hpcrl stage my-first.toml --site mycluster",
        "hpcrl stage quickstart --site local -s model.path=Qwen/Qwen3-0.6B",
        "hpcrl site new NAME --detect",
        "hpcrl stage RECIPE --site NAME",
        "hpcrl doctor --site NAME",
        "hpcrl submit quickstart --site NAME --dry-run",
        "HPCRL_LAB=/tmp/second",
        "hpcrl lab up --like mycluster",
    ),
    "like frontier": (
        "hpcrl lab up --like frontier",
        "hpcrl submit quickstart --site /tmp/hpcrl-lab-0/site.toml --watch",
    ),
    "like perlmutter": (
        "hpcrl lab up --like perlmutter",
        'eval "$(hpcrl lab env)"',
        "hpcrl submit quickstart --site perlmutter -s site.account=m1234 --dry-run",
        "hpcrl stage my/recipe.toml --site perlmutter",
        "hpcrl doctor --site my-perlmutter",
        "hpcrl stage qwen3-8b-math --site my-perlmutter",
        "hpcrl submit qwen3-8b-math --site my-perlmutter --dry-run",
        "hpcrl submit qwen3-8b-math --site my-perlmutter --name math -s limits.node_hours=100",
        "hpcrl stop math --now",
    ),
}
"""Lines for tests/slurm/test_printed_on_labs.py, each session in one shell."""

CAMPAIGN_LINES: dict[str, tuple[str, ...]] = {
    "NAME": (
        "hpcrl resume NAME --accept",
        "hpcrl resume NAME -s job.walltime_min=240 --watch",
        "hpcrl extend NAME --steps 300 --jobs 3",
    ),
    "math": (
        "hpcrl resume math",
        "hpcrl resume math -s job.walltime_min=240",
        "hpcrl extend math --steps 300 --jobs 3",
    ),
    "quickstart-1": (
        "hpcrl resume quickstart-1 -s train.learning_rate=1e-6 -s job.walltime_min=120",
        "hpcrl resume quickstart-1 --watch",
        "hpcrl extend quickstart-1 --steps 80",
    ),
}
"""Lines by the campaign that they continue; tests/e2e/test_printed_commands.py stops it before each resume."""

AT_TERMINAL = ("hpcrl rm quickstart-1",)
"""Lines that ask before they do anything."""

VLLM_LINE = ".venv/bin/hpcrl submit recipes/quickstart-vllm.toml --site local --watch"
"""The line for tests/vllm/test_vllm_quickstart.py."""

ENDLESS = (
    "hpcrl monitor quickstart-1",
    "hpcrl monitor lab-1",
    "hpcrl monitor math",
    "hpcrl events quickstart-1 --kind fault --kind worker-failed -f",
)
"""Lines that run until they are interrupted."""

WITH_PAGES = (
    "hpcrl try my-agent.toml --domain sums",
    "hpcrl submit my-agent.toml --site local --watch",
    "export PYTHONPATH=$PWD",
    "hpcrl try my-maze.toml",
    "hpcrl submit my-maze.toml --site local --watch",
    "hpcrl try my-reward.toml",
)
"""Lines for tests/e2e/test_howto_pages.py, which has the files of their pages, and makes campaigns small."""

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
        "uv python install 3.12 --install-dir ~/mini-swe-agent",
        "cd ~/mini-swe-agent && ln -s cpython-3.12* python",
        "~/mini-swe-agent/python/bin/python3 -m pip install --break-system-packages mini-swe-agent",
    ),
    "fetches images of a registry": (
        "hpcrl stage qwen3-32b-swe --site SITE",
        "hpcrl image --site perlmutter --wheel dist/hpcrl-0.1.0-py3-none-any.whl --build",
    ),
    "is a step of a tutorial that a test follows": (
        "hpcrl submit quickstart --site local --watch",
        "hpcrl extend lab-1 --steps 44",
    ),
    "needs agents in another environment: tests/agents": (
        "hpcrl submit code-repair --site local -s \"domains.repair.options.readable=['$PWD/agent']\" "
        '-s "domains.repair.options.environment.PATH=$PWD/agent/bin:/usr/bin:/bin"',
    ),
    "takes minutes: tests/slurm/test_doctor.py runs the one, and a session above another of the same words": (
        "hpcrl doctor --site lab --job",
        "hpcrl doctor --site NAME --job",
    ),
    "needs GPUs": (
        "hpcrl submit my-first.toml --site mycluster --watch",
        "hpcrl calibrate my-campaign",
    ),
    "needs fish, or serves pages of inspect-ai": (
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
    printed |= {f"{f'hpcrl {name}'.strip()} --help": list(examples) for name, examples in EXAMPLES.items()}
    return {place: lines for place, lines in printed.items() if lines}


def list_special() -> set[str]:
    """Return the lines that need more than a finished campaign, or are not run."""
    groups = (
        *LAB_SESSIONS.values(),
        *CAMPAIGN_LINES.values(),
        ENDLESS,
        AT_TERMINAL,
        WITH_PAGES,
        (VLLM_LINE,),
        *NOT_RUN.values(),
    )
    return {line for lines in groups for line in lines}


def list_runnable(place: str) -> list[str]:
    """Return the lines of a page, or of a command's help, that are run on a finished campaign."""
    left_out = list_special()
    return [line for line in list_printed()[place] if line not in left_out]
