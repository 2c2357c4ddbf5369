"""The monitor as a process on a real terminal, of any width and without colours, and in a pipe."""

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from hpcrl.campaign_dir.event_log import EventLog
from hpcrl.campaign_dir.events import FaultReported
from hpcrl.cli import main
from hpcrl.commands import monitoring
from hpcrl.spool.segment import write_segment
from hpcrl.system.files import make_private_dir, publish_json
from tests.support.trajectories import make_lake_trajectory
from tests.unit.commands.conftest import CampaignMaker

HOSTILE = "\x1b]0;title\x07 \xe9 \u2192 " + "x" * 300
PLAIN = {"LC_ALL": "C", "NO_COLOR": "1", "TERM": "xterm"}
CHOSEN = ("COLUMNS", "LINES", "PYTHONIOENCODING", "PYTHONUTF8", "PYTHONCOERCECLOCALE", "LC_CTYPE", "LANG")
COMMAND = [sys.executable, "-m", "hpcrl.cli", "monitor", "one"]
SHOWN_BY_KEY = {
    b"r": b"next role",
    b"n": b"next role",
    b"e": b"xxxx",
    b"a": b"no rule found",
    b"l": b"no log",
    b"t": b"the newest",
    b"h": b"what is wrong",
    b"o": b"steps ",
}
COLOURS = (b"\x1b[3", b"\x1b[4", b"\x1b[9")


@pytest.fixture
def environment(home: Path, make_campaign: CampaignMaker) -> dict[str, str]:
    """Make a campaign with a hostile event; return an environment without colours, in locale C."""
    campaign = make_campaign("one")
    log = EventLog.open(campaign, "env", 1, job=0, role="env")
    log.emit(FaultReported(what="env-fault", detail=HOSTILE))
    log.close()
    return {name: value for name, value in os.environ.items() if name not in CHOSEN} | PLAIN


@pytest.mark.parametrize("columns", [20, 40, 200])
def test_every_key_works_on_a_terminal_without_colours_in_locale_c(environment: dict[str, str], columns: int) -> None:
    user, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    monitor = subprocess.Popen(
        ["setsid", "--ctty", "--wait", *COMMAND], stdin=terminal, stdout=terminal, stderr=terminal, env=environment
    )
    os.close(terminal)
    try:
        await_text(user, b"q quit")
        for key, shown in SHOWN_BY_KEY.items():
            os.write(user, key)
            await_text(user, shown)
        os.write(user, b"q")
        assert monitor.wait(60) == 0
    finally:
        os.close(user)  # a monitor that is left gets SIGHUP
        monitor.wait(60)


@pytest.mark.parametrize(
    ("words", "locale"),
    [
        (["monitor", "one", "--once"], {"LC_ALL": "C"}),
        (["monitor", "one", "--once"], {"LC_ALL": "", "LANG": "POSIX"}),
        (["ls"], {"LC_ALL": "C"}),
        (["compare", "one", "two"], {"LC_ALL": "C"}),
        (["traj", "stats", "two"], {"LC_ALL": "C"}),
        (["traj", "stats", "two"], {"LC_ALL": "", "LANG": "C"}),
    ],
)
def test_all_that_is_drawn_in_locale_c_is_ascii(
    environment: dict[str, str],
    make_campaign: CampaignMaker,
    tmp_path: Path,
    words: list[str],
    locale: dict[str, str],
) -> None:
    campaign = make_campaign("two")
    make_private_dir(campaign.spool("scored"))
    write_segment(
        campaign.spool("scored") / "000-env-0-00000000-1-0123abcd.h5", [make_lake_trajectory(1, 0, reward=1.0)]
    )
    seen = subprocess.run(
        [*COMMAND[:3], *words], capture_output=True, check=True, env=environment | locale, cwd=tmp_path
    ).stdout
    assert seen.strip()
    assert seen.isascii(), seen.decode()


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["submit", "quickstart", "--site", "local", "--dry-run"], b"the environments and rewards are imported"),
        (["plan", "quickstart", "--site", "local"], b"the plan is made"),
        (["resume", "one"], b"the last job is looked at, and what the campaign has recorded is read"),
        (["try", "quickstart", "-n", "1"], b"the model is loaded, then episodes of lake are played"),
        (["simulate", "quickstart", "--site", "local"], b"the campaign is simulated"),
        (["export", "one", "--hf", "model"], b"the checkpoint is written as a model"),
        (["compare", "one", "two"], b"the events of one and two are read"),
        (["traj", "stats", "one"], b"the trajectories are read"),
        (["traj", "show", "one", "--best"], b"the trajectories are read"),
        (["report", "one"], b"one: reading events"),
        (["events", "one"], b"the events of one are read"),
        (["gc"], b"campaigns are looked through"),
        (["rm", "one", "--yes"], b"the files of one are removed"),
        (["rm", "one"], b"its size is measured"),
        (["calibrate", "one"], b"the measurements are read, and the cost model is fitted to them"),
        (["-m", "bench.cli"], b"cli is measured"),
    ],
)
def test_what_takes_long_is_shown_on_a_terminal(
    environment: dict[str, str], make_campaign: CampaignMaker, tmp_path: Path, words: list[str], shown: bytes
) -> None:
    """The command is killed, and leaves its temporary directory."""
    make_campaign("two")
    user, terminal = pty.openpty()
    command = subprocess.Popen(
        [*COMMAND[:1], *words] if words[0] == "-m" else [*COMMAND[:3], *words],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env=environment | {"TMPDIR": str(tmp_path)},
        start_new_session=True,
    )
    os.close(terminal)
    try:
        await_text(user, shown)
    finally:
        os.killpg(command.pid, signal.SIGKILL)
        command.wait(60)
        os.close(user)


def await_text(user: int, text: bytes) -> None:
    """Read what a terminal shows until it has a text; it is plain, without colours and titles."""
    seen = b""
    while text not in seen:
        ready, _, _ = select.select([user], [], [], 60)
        try:
            assert ready
            seen += os.read(user, 65536)
        except (AssertionError, OSError):
            raise AssertionError(f"{text!r} was not shown: {seen[-3000:]!r}") from None
    assert b"Traceback" not in seen
    assert b"\x1b]0;" not in seen
    assert not any(colour in seen for colour in COLOURS)


@pytest.mark.parametrize("columns", [20, 40, 200])
def test_one_frame_in_a_pipe_is_plain_and_whole_in_locale_c(environment: dict[str, str], columns: int) -> None:
    sized = environment | {"COLUMNS": str(columns)}
    done = subprocess.run([*COMMAND, "--once"], env=sized, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"\x1b" not in done.stdout
    assert done.stdout.isascii()
    assert done.stdout.count(b"x") >= 300
    assert max(map(len, done.stdout.splitlines())) <= max(columns, 20)


def test_the_monitor_ends_with_the_campaign_without_a_terminal(environment: dict[str, str]) -> None:
    done = subprocess.run(COMMAND, env=environment, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"done     step 4/40" in done.stdout.splitlines()[-1]


@pytest.mark.parametrize("option", ["--once", "--json"])
def test_a_reader_that_closes_the_pipe_at_once_ends_the_monitor_silently(
    environment: dict[str, str], option: str
) -> None:
    command = " ".join([*COMMAND, option])
    shell = f"set -o pipefail; {command} | true"
    done = subprocess.run(["bash", "-c", shell], env=environment, capture_output=True, timeout=60, check=False)
    assert done.stderr == b""
    assert done.returncode in (0, 141)


def test_json_has_no_character_that_controls_a_terminal(home: Path, make_campaign: CampaignMaker) -> None:
    campaign = make_campaign("one")
    outcome = {"outcome": "failed", "reason": "a\x1b[31m b\x9b31m c\x7f d\x85 \u202e \xe9 \u2192", "time": 2.0}
    campaign.job(0).outcome.write_text(json.dumps(outcome))
    for words in (["monitor", "one", "--json"], ["ls", "--json"], ["events", "one", "--json"]):
        for locale in ({}, PLAIN):
            done = subprocess.run(
                [sys.executable, "-m", "hpcrl.cli", *words], env=os.environ | locale, capture_output=True, check=True
            )
            text = done.stdout.decode()
            assert not [
                one for one in text if one != "\n" and (ord(one) < 32 or 126 < ord(one) < 160 or one == "\u202e")
            ]
    (line,) = json.loads(subprocess.run([*COMMAND[:3], "ls", "--json"], capture_output=True, check=True).stdout)
    assert line["reason"] == outcome["reason"]


@pytest.mark.parametrize(
    ("called", "shown"),
    [("venv/bin/hpcrl", "venv/bin/hpcrl"), ("/elsewhere/bin/hpcrl", "/elsewhere/bin/hpcrl"), ("x/pytest", "hpcrl")],
)
def test_closing_words_name_the_command_as_it_can_be_called_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, called: str, shown: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [called if called.startswith("/") else str(tmp_path / called)])
    assert monitoring._command_name() == shown


def test_a_site_that_cannot_be_read_hides_nothing_else(
    make_campaign: CampaignMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    campaign = make_campaign("quickstart-1")
    campaign.job(0).outcome.unlink()
    publish_json(campaign.job(0).submission, {"id": "7", "scheduler": "slurm", "time": 1.0})
    campaign.site.write_text('{"name": "la')
    assert main(["monitor", "quickstart-1", "--once"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "4/" in shown
    assert "site.json cannot be read" in shown


def test_an_environment_that_ends_the_process_of_a_trial_is_named(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "ending.py").write_text(
        "import os\nfrom hpcrl.envs.gymnasium_text import FrozenLake\n"
        "class Ending(FrozenLake):\n    async def step(self, action):\n        os._exit(7)\n"
    )
    own = environment | {"PYTHONPATH": os.pathsep.join((str(tmp_path), environment.get("PYTHONPATH", "")))}
    words = [*COMMAND[:3], "try", "quickstart", "-n", "1", "-s", 'domains.lake.env="ending:Ending"']
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=own, cwd=tmp_path)
    assert done.returncode == 1
    assert "ended with code 7: the environments of lake run in it, and one may have ended it" in done.stderr
