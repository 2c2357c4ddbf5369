"""Campaigns whose files are damaged or missing: one message each, and no other campaign suffers."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcrl.campaign.directory import find_campaign, list_campaigns, reserve_campaign
from hpcrl.campaign.request import load_request
from hpcrl.campaign.running_jobs import stop_gracefully, stop_now
from hpcrl.campaign.submission import write_description
from hpcrl.campaign_dir.campaign_format import CAMPAIGN_FORMAT, describe_newer_format
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.cli import main
from hpcrl.errors import CampaignError
from hpcrl.system.files import make_private_dir, publish_json
from tests.support.synthetic import SyntheticCampaign


@pytest.fixture
def good(home: Path) -> SyntheticCampaign:
    make_private_dir(home / "campaigns")
    return SyntheticCampaign(home / "campaigns" / "good")


DAMAGED = [
    '{"name":"badj"}', "[1]", "", "{", '{"name":"badj","created":1e999}', '{"name":"badj","created":[]}',
    '{"name":"badj","created":' + "9" * 400 + "}", "[" * 100_000,
]  # fmt: skip


@pytest.mark.parametrize("text", DAMAGED, ids=[*map(str, range(len(DAMAGED)))])
def test_a_damaged_campaign_is_listed_after_the_good_ones(home: Path, good: SyntheticCampaign, text: str) -> None:
    make_private_dir(home / "campaigns" / "badj")
    (home / "campaigns" / "badj" / "campaign.json").write_text(text)

    assert [campaign.name for campaign in list_campaigns()] == ["good", "badj"]
    with pytest.raises(CampaignError, match="there are good, badj"):
        find_campaign("missing")


def test_ls_names_the_campaign_that_is_damaged(
    home: Path, good: SyntheticCampaign, capsys: pytest.CaptureFixture[str]
) -> None:
    make_private_dir(home / "campaigns" / "badj")
    (home / "campaigns" / "badj" / "campaign.json").write_text("[1]")

    assert main(["ls", "--json"]) == 0

    printed = capsys.readouterr()
    assert [line["name"] for line in json.loads(printed.out)] == ["good", "badj"]
    assert printed.err.startswith("campaign badj: campaign.json cannot be read: ")


@pytest.mark.parametrize("words", [["logs"], ["stop"], ["stop", "--now"], ["resume"]])
def test_a_campaign_without_a_job_is_refused_with_the_fix(
    home: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    """Submission was killed before it started the job."""
    request = load_request("quickstart", site="local")
    write_description(reserve_campaign("good", stem="quickstart", site=request.site), request)

    assert main([*words, "good"]) == 2

    message = capsys.readouterr().err
    assert message.startswith("hpcrl: campaign 'good' has no job: ")
    assert "submit it again" in message


@pytest.mark.parametrize("text", ['{"name": "good", "cre', "[]", '{"digests": 3}'])
@pytest.mark.parametrize("words", [["resume", "good"], ["extend", "good", "--steps", "60"]])
def test_a_campaign_whose_record_is_damaged_is_not_continued(
    good: SyntheticCampaign, capsys: pytest.CaptureFixture[str], text: str, words: list[str]
) -> None:
    write_description(good.directory, load_request("quickstart", site="local"))
    good.submit_local()
    good.directory.manifest.write_text(text)

    assert main(words) == 2

    printed = capsys.readouterr().err
    assert printed.count("\n") == 1, printed
    assert "campaign.json is damaged" in printed


@pytest.mark.parametrize("record", ["recipe", "site", "plan", "manifest"])
def test_a_record_that_is_nested_too_deep_ends_no_command_with_a_traceback(
    good: SyntheticCampaign, record: str
) -> None:
    write_description(good.directory, load_request("quickstart", site="local"))
    good.submit_local(pid=2**22 + 1)
    getattr(good.directory, record).write_text("[" * 3000 + "]" * 3000)

    for words in (["resume", "good"], ["report", "good"], ["traj", "verify", "good"], ["gc", "good"]):
        command = [sys.executable, "-m", "hpcrl.cli", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=good.directory.root)
        assert done.returncode in (0, 1, 2)
        assert "Traceback" not in done.stderr, words
        assert "recursion" not in (done.stdout + done.stderr).lower(), words


def test_logs_of_a_job_without_logs_name_their_directory(
    good: SyntheticCampaign, capsys: pytest.CaptureFixture[str]
) -> None:
    good.submit_local()

    assert main(["logs", "good"]) == 2

    assert capsys.readouterr().err == f"hpcrl: job 0 of good has no logs in {good.directory.job(0).logs}\n"


@pytest.mark.parametrize("stop", [stop_gracefully, stop_now])
def test_stop_reports_that_a_local_job_without_an_outcome_has_ended(
    good: SyntheticCampaign, stop: Callable[[str], str]
) -> None:
    """The guardian and its driver were killed: no process is left that could record an outcome."""
    good.submit_local(pid=2**22 + 1)

    assert "good has ended already (failed: it ended without an outcome" in stop("good")
    assert not CampaignDir(good.directory.root).stop.exists()


@pytest.fixture
def newer(good: SyntheticCampaign) -> SyntheticCampaign:
    """Make a campaign of a format that this version does not know."""
    write_description(good.directory, load_request("quickstart", site="local"))
    good.submit_local()
    good.outcome("stopped", "a user asked for it")
    manifest = json.loads(good.directory.manifest.read_text())
    publish_json(good.directory.manifest, manifest | {"format": CAMPAIGN_FORMAT + 1, "hpcrl": "9.9"})
    return good


def test_a_campaign_records_its_format(home: Path) -> None:
    request = load_request("quickstart", site="local")
    campaign = reserve_campaign("one", stem="quickstart", site=request.site)
    write_description(campaign, request)
    assert json.loads(campaign.manifest.read_text())["format"] == CAMPAIGN_FORMAT
    assert describe_newer_format(campaign) == ""


@pytest.mark.parametrize(
    "words", [["resume", "good"], ["resume", "good", "--accept"], ["extend", "good", "--steps", "60"], ["gc", "good"]]
)
def test_a_campaign_of_a_newer_format_is_not_changed(
    newer: SyntheticCampaign, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert main(words) == 2
    (printed,) = capsys.readouterr().err.splitlines()
    assert printed.startswith("hpcrl: campaign good has format 2, of hpcrl 9.9; hpcrl ")
    assert newer.directory.job_numbers() == [0]


@pytest.mark.parametrize("words", [["monitor", "good", "--json"], ["ls"], ["events", "good"]])
def test_a_campaign_of_a_newer_format_is_shown_with_a_note(
    newer: SyntheticCampaign, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert main(words) == 0
    (note,) = capsys.readouterr().err.splitlines()
    assert "campaign good has format 2" in note


@pytest.mark.parametrize("value", [None, "x", [], -1, 0])
def test_a_format_that_is_no_number_is_not_newer(newer: SyntheticCampaign, value: object) -> None:
    publish_json(newer.directory.manifest, {"name": "good", "format": value})
    assert describe_newer_format(newer.directory) == ""


def make_file(home: Path) -> None:
    home.write_text("")


def make_dangling_link(home: Path) -> None:
    home.symlink_to(home.with_name("nowhere"))


def make_campaigns_a_file(home: Path) -> None:
    home.mkdir()
    (home / "campaigns").write_text("")


@pytest.mark.parametrize("spoil", [make_file, make_dangling_link, make_campaigns_a_file])
@pytest.mark.parametrize("words", [["ls"], ["monitor", "one"], ["gc"]])
def test_a_home_that_is_no_directory_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    spoil: Callable[[Path], None],
    words: list[str],
) -> None:
    home = tmp_path / "spoilt"
    spoil(home)
    monkeypatch.setenv("HPCRL_HOME", str(home))
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith(f"hpcrl: {home}/campaigns ")
    assert "set $HPCRL_HOME to another directory" in err


@pytest.mark.parametrize("home", ["x" * 5000, "/proc/version/below"])
def test_a_home_that_cannot_be_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], home: str
) -> None:
    monkeypatch.setenv("HPCRL_HOME", home)
    assert main(["ls"]) == 2
    assert f"{home}/campaigns cannot be read" in capsys.readouterr().err


def test_a_home_that_cannot_be_made_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HPCRL_HOME", "/proc/nope")
    assert main(["ls"]) == 2
    assert "/proc/nope/campaigns cannot be made: set $HPCRL_HOME" in capsys.readouterr().err


def test_a_home_that_is_not_there_yet_is_shown_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HPCRL_HOME", str(tmp_path / "later"))
    assert main(["ls"]) == 0
    assert capsys.readouterr().out.startswith(f"no campaigns yet in $HPCRL_HOME ({tmp_path}/later)")
