"""The commands that pages and the help print, as printed, in a fresh home with a campaign that has ended."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrl.campaign_dir.paths import CampaignDir
from tests.support.campaigns import SIMULATED, end_campaigns, hpcrl, outcome, steps, until
from tests.support.doc_blocks import find_files
from tests.support.printed_commands import CAMPAIGN_LINES, ENDLESS, ROOT, list_printed, list_runnable

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

CAMPAIGNS = ("quickstart-1", "lab-1", "quickstart-2", "math", "OTHER", "my-campaign")
SITES = ("NAME", "mycluster", "my-perlmutter")
SERVERS = "gpu,model,batch,prompt_tokens,reply_tokens,token_ms\n" + "".join(
    f"{gpu},Qwen/Qwen3-8B,{batch},{prompt},200,{4 + batch / 10 + prompt / 1000}\n"
    for gpu in ("h100", "b200")
    for batch in (1, 4, 16)
    for prompt in (100, 1000, 2000)
)
CALLS = "session,t_s,prompt_tokens,reply_tokens\na,0,100,20\na,3,150,30\nb,0,80,10\n"
PLACES = [place for place in list_printed() if list_runnable(place)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Run a quickstart to its end, with checkpoints as those of the whole one; read only."""
    home = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HPCRL_HOME", str(home))
        try:
            hpcrl("submit", "quickstart", "--site", "local", "--watch", *SIMULATED, "-s", "train.num_steps=40")
        finally:
            end_campaigns(home)
    yield home / "campaigns" / "quickstart-1"
    shutil.rmtree(home, ignore_errors=True)


@pytest.fixture
def work(finished: Path, tmp_path: Path) -> Path:
    """Make a home with campaigns, sites, and the files that commands name; return the directory of these files."""
    for name in CAMPAIGNS:
        shutil.copytree(finished, tmp_path / ".hpcrl" / "campaigns" / name, symlinks=True)
    sites = tmp_path / ".config" / "hpcrl" / "sites"
    sites.mkdir(parents=True)
    for name in SITES:
        (sites / f"{name}.toml").write_text('extends = "perlmutter"\naccount = "m1234"\n')
    recipe = tmp_path / "work" / "my" / "recipe.toml"
    recipe.parent.mkdir(parents=True)
    recipe.write_text('name = "mine"\nextends = "quickstart"\n')
    work = tmp_path / "work"
    (work / "servers.csv").write_text(SERVERS)
    (work / "calls.csv").write_text(CALLS)
    return work


@pytest.mark.parametrize("place", PLACES)
def test_what_is_printed_runs_as_printed(place: str, work: Path) -> None:
    for name, text in find_files(ROOT / place).items() if place.endswith(".md") else ():
        (work / name).write_text(text)
    for line in list_runnable(place):
        done = run_line(line, folder=work)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        assert "Traceback" not in done.stderr, line
        if line.startswith("hpcrl") and ">" not in line:
            assert done.stdout or done.stderr, f"{line} printed nothing"


@pytest.mark.parametrize("name", CAMPAIGN_LINES)
def test_a_campaign_continues_as_printed(name: str, home: Path, campaigns: Path) -> None:
    hpcrl("submit", "quickstart", "--site", "local", "--name", name, *SIMULATED, "-s", "train.num_steps=60")
    campaign = CampaignDir(campaigns / name)
    for line in CAMPAIGN_LINES[name]:
        num_jobs = len(campaign.job_numbers())
        if line.startswith("hpcrl resume"):
            until(lambda: len(steps(campaign)) > 2, what="steps are made")
            hpcrl("stop", name)
        outcome(campaign, num_jobs - 1)
        done = run_line(line, folder=home.parent, HPCRL_HOME=str(home))
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        assert len(campaign.job_numbers()) == num_jobs + 1, line


@pytest.mark.parametrize("line", ENDLESS)
def test_a_line_that_does_not_end_shows_its_campaign_until_it_is_interrupted(line: str, work: Path) -> None:
    ended = f"timeout --foreground -s INT 4 {line}"
    done = run_line(f"script -qec {shlex.quote(ended)} /dev/null", folder=work, TERM="xterm")
    assert done.returncode in (0, 124), done.stdout
    assert "Traceback" not in done.stdout
    assert ("events" in line) or ("quickstart on local" in done.stdout)


def test_a_removal_asks_in_a_terminal(work: Path) -> None:
    done = run_line("echo y | script -qec 'hpcrl rm quickstart-1' /dev/null", folder=work, TERM="xterm")
    assert done.returncode == 0, done.stdout
    assert not (work.parent / ".hpcrl" / "campaigns" / "quickstart-1").exists()


def run_line(line: str, *, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    programs = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    environment = {"HOME": str(folder.parent), "PATH": programs, "LANG": "C.UTF-8"} | variables
    command = ["bash", "-o", "pipefail", "-c", line]
    return subprocess.run(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
