"""What the commands print and refuse, on campaigns without processes."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpcrl.campaign import continuation
from hpcrl.campaign_dir.event_log import EventLog
from hpcrl.campaign_dir.events import EpisodesCounted, StepFinished
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.cli import main
from hpcrl.commands.campaign_logs import format_event
from hpcrl.commands.monitoring import final_summary
from hpcrl.config.recipe import Recipe, make_recipe
from hpcrl.config.toml import load_table
from hpcrl.system.files import make_private_dir, publish_json, read_json
from tests.support.campaigns import BOUND_BY_MODES, hpcrl
from tests.unit.commands.conftest import CampaignMaker

NO_CHECKPOINT = "without a checkpoint, job local-7 starts at step 0"


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    return err


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 0
    return capsys.readouterr().out


def test_events_are_printed_with_their_times_and_without_controls(
    make_campaign: CampaignMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    make_campaign("one")
    lines = printed(capsys, "events", "one").splitlines()
    assert len(lines) == 6
    assert any(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  000-train-0 +step +step=1 ", line) for line in lines)
    assert any("checkpoint at step 4 (version 4)" in line for line in lines)
    assert any(r"\x1b[31mRuntimeError\x1b[0m: broken" in line for line in lines)


def test_nested_values_of_events_are_printed_as_json(
    make_campaign: CampaignMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    log = EventLog.open(make_campaign("one"), "env", 1, job=0, role="env")
    log.emit(EpisodesCounted(done=3, outcomes={"lake": {"finished": 3}}))
    log.close()
    assert 'outcomes={"lake": {"finished": 3}}' in printed(capsys, "events", "one", "--kind", "episodes")


def test_events_on_a_terminal_fill_two_lines_and_keep_texts(make_campaign: CampaignMaker) -> None:
    counts = {"event": "episodes", "worker": "000-env-0", "outcomes": {"lake": {"finished": 3}}} | {
        name: 1000 for name in ("running", "done", "truncated", "num_tokens", "turns", "env_fault", "policy_fault")
    }
    whole, fitted = format_event(counts), format_event(counts, width=60)
    assert len(fitted) <= 120 < len(whole)
    assert "running=1000" in fitted
    assert fitted.endswith("  ...")
    reason = "no place " * 30
    shown = format_event({"event": "events-lost", "reason": reason, "num": 7, "counts": [1] * 100}, width=60)
    assert f"reason={reason}  ..." in shown


def test_the_list_of_campaigns_and_a_plan_show_whole_words_on_a_narrow_screen(
    make_campaign: CampaignMaker, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Campaigns have fewer columns; the lines of a plan are those of a wide screen, and the terminal wraps them."""
    make_campaign("quickstart-1")
    wide = printed(capsys, "plan", "quickstart", "--site", "local")
    monkeypatch.setenv("COLUMNS", "20")
    lines = [line.split() for line in printed(capsys, "ls").splitlines()]
    assert lines == [["name", "state"], ["quickstart-1", "done"]]
    assert printed(capsys, "plan", "quickstart", "--site", "local") == wide


def test_a_campaign_is_not_compared_with_itself(
    make_campaign: CampaignMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    campaign = make_campaign("one")
    assert "compare one with another campaign" in refused(capsys, "compare", "one", str(campaign.root))


def test_a_long_list_of_an_event_is_shown_by_its_length() -> None:
    shown = format_event({"event": "scored", "segment": "a.h5", "rewards": {"lake": [1.0] * 64, "taxi": [0.5]}})
    assert 'rewards={"lake": "64 values", "taxi": [0.5]}' in shown


@pytest.mark.parametrize("columns", [60, 200])
def test_a_comparison_in_a_pipe_is_as_wide_as_asked_for(
    make_campaign: CampaignMaker, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    """One name of 64 characters fits beside the figures in 200 columns only."""
    monkeypatch.setenv("COLUMNS", str(columns))
    name = "x" * 64
    make_campaign(name), make_campaign("two")
    lines = printed(capsys, "compare", name, "two").splitlines()
    assert max(map(len, lines)) <= columns
    assert any(name in line for line in lines) == (columns == 200)


def test_a_comparison_on_a_narrow_terminal_breaks_no_word(
    make_campaign: CampaignMaker, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    make_campaign("one"), make_campaign("two", "train.learning_rate=0.003")
    lines = printed(capsys, "compare", "one", "two").splitlines()
    assert max(map(len, lines)) <= 20
    assert "steps: 4 | 4" in lines
    assert "one setting differs: one | two" in " ".join(lines)


def test_a_partition_that_one_site_lacks_is_one_row_of_a_comparison(
    make_campaign: CampaignMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    make_campaign("one")
    path = make_campaign("two").site
    site = json.loads(path.read_text())
    site["partitions"]["gpu"] = next(iter(site["partitions"].values()))
    path.write_text(json.dumps(site))
    lines = printed(capsys, "compare", "one", "two").splitlines()
    assert lines[-2].split() == ["one", "setting", "differs", "one", "two"]
    assert lines[-1].split() == ["site.partitions.gpu", "-", "defined"]


def test_a_report_has_a_campaign_once(make_campaign: CampaignMaker, capsys: pytest.CaptureFixture[str]) -> None:
    campaign = make_campaign("one")
    assert "report: one is named twice" in refused(capsys, "report", "one", str(campaign.root))


def test_events_are_chosen_by_kind_role_and_number(
    make_campaign: CampaignMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    make_campaign("one")
    assert len(printed(capsys, "events", "one", "--kind", "step", "-n", "2").splitlines()) == 2
    faults = printed(capsys, "events", "one", "--role", "env", "--json").splitlines()
    assert [json.loads(line)["event"] for line in faults] == ["fault"]


def test_an_unknown_kind_of_event_is_refused_with_the_nearest(
    make_campaign: CampaignMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    make_campaign("one")
    assert "did you mean 'checkpoint'? " in refused(capsys, "events", "one", "--kind", "checkpoints")
    assert "did you mean 'env'? " in refused(capsys, "events", "one", "--role", "envs")
    assert "or 0 for all" in refused(capsys, "events", "one", "-n", "-5")


def test_logs_show_the_last_state_of_a_progress_bar_and_no_controls(
    make_campaign: CampaignMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    job = make_campaign("one").job(0)
    job.log("train-0").write_text("first\nload 10%\rload 100%\n\x1b]0;title\x07last\n")
    lines = printed(capsys, "logs", "one", "train", "-n", "2").splitlines()
    assert lines[1:] == ["load 100%", r"\x1b]0;title\x07last"]


def test_a_negative_number_of_lines_is_refused_and_a_log_that_is_not_shown_is_not_empty(
    make_campaign: CampaignMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    log = make_campaign("one").job(0).log("env-0")
    log.write_text("line\n")
    assert "-n -1: give the number of lines" in refused(capsys, "logs", "one", "-n", "-1")
    assert printed(capsys, "logs", "one", "-n", "0") == f"== {log}\n"


def test_logs_of_an_unknown_role_are_refused_with_the_nearest(
    make_campaign: CampaignMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    job = make_campaign("one").job(0)
    for name in ("train-0", "env-0", "batch"):
        job.log(name).touch()
    message = refused(capsys, "logs", "one", "trains")
    assert "did you mean 'train'? it has driver, env, train" in message


def test_logs_that_are_followed_end_with_their_job(
    make_campaign: CampaignMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    make_campaign("one").job(0).log("env-0").write_text("line\n")
    assert printed(capsys, "logs", "one", "-f").splitlines()[1:] == ["line"]


def test_events_that_are_followed_end_with_their_job(
    make_campaign: CampaignMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    made = make_campaign("one")
    assert made.job(0).outcome.exists()
    assert printed(capsys, "events", "one", "-f") == printed(capsys, "events", "one")


def test_campaigns_are_compared_without_settings_where_a_recipe_cannot_be_read(
    make_campaign: CampaignMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    make_campaign("one")
    make_campaign("two").recipe.write_bytes(b"\xf8")
    assert main(["compare", "one", "two"]) == 0
    shown = capsys.readouterr()
    assert "reward, last steps" in shown.out
    assert "setting" not in shown.out
    assert "recipe or site of two cannot be read" in shown.err


def test_settings_that_are_not_a_table_are_named(
    make_campaign: CampaignMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    make_campaign("one")
    make_campaign("two").recipe.write_text("[]")
    assert main(["compare", "one", "two"]) == 0
    assert "are not compared: recipe.json is not a table" in capsys.readouterr().err


@pytest.mark.parametrize("created", [1e300, -1e14])
def test_a_campaign_with_an_impossible_date_is_listed_with_the_others(
    created: float, make_campaign: CampaignMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    make_campaign("one")
    odd = make_campaign("two")
    publish_json(odd.manifest, read_json(odd.manifest) | {"created": created})
    lines = printed(capsys, "ls").splitlines()
    assert any(line.startswith("one ") for line in lines)
    assert any(line.startswith("two ") and "?" in line for line in lines)


def test_a_comparison_notes_what_is_not_known_of_a_campaign(
    make_campaign: CampaignMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    without_steps, without_jobs = make_campaign("one"), make_campaign("two")
    for campaign in (without_steps, without_jobs):
        (campaign.checkpoints / "000001-step-000004").mkdir(parents=True)
    for path in without_steps.events.iterdir():
        path.unlink()
    shutil.rmtree(without_jobs.jobs)
    assert main(["compare", "one", "two"]) == 0
    restore = f"restore {without_jobs.jobs}"
    assert capsys.readouterr().err.splitlines() == [
        "hpcrl: note: one: events/ lacks steps: it has none, and a checkpoint is of step 4",
        f"hpcrl: note: two: campaign 'two' has results, and the records of its jobs are gone: {restore}",
    ]


def test_a_directory_elsewhere_is_not_removed(
    make_campaign: CampaignMaker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = tmp_path / "elsewhere" / "one"
    shutil.copytree(make_campaign("one").root, elsewhere, symlinks=True)
    assert "remove the directory yourself" in refused(capsys, "rm", str(elsewhere), "--yes")
    assert (elsewhere / "campaign.json").exists()


@pytest.mark.parametrize("name", ["", ".."])
def test_a_name_that_is_none_is_not_the_directory_of_campaigns(
    make_campaign: CampaignMaker, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    make_campaign("one")
    assert "has no campaign.json" not in refused(capsys, "monitor", name) or name
    assert "there are one" in refused(capsys, "rm", name, "--yes")


def test_settings_are_compared_as_recipes_have_them(
    make_campaign: CampaignMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    make_campaign("one", "train.learning_rate=1e-6", reward=0.1234)
    make_campaign("two", "train.learning_rate=0.003")
    text = printed(capsys, "compare", "one", "two")
    assert re.search(r"train.learning_rate +1e-0?6 +0\.003", text)
    assert re.search(r"reward, last steps +0\.\d{3} +0\.\d{3}", text)


def test_a_campaign_is_removed_only_after_agreement(
    make_campaign: CampaignMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    campaign = make_campaign("one")
    assert "add --yes" in refused(capsys, "rm", "one")
    assert campaign.manifest.exists()
    assert printed(capsys, "rm", "one", "--yes") == "campaign one is removed\n"
    assert not campaign.root.exists()


@pytest.mark.parametrize(
    ("folder", "times", "code"), [("events", 2, 0), ("events", 10**9, 2), ("one", 2, 0), ("one", 10**9, 2)]
)
def test_a_removal_that_running_workers_disturb_is_tried_again_and_can_be_repeated(
    make_campaign: CampaignMaker, capsys: pytest.CaptureFixture[str], folder: str, times: int, code: int
) -> None:
    """A process refills a directory before each attempt to remove it, some times or for ever."""
    campaign = make_campaign("one")
    ended = subprocess.run(
        [sys.executable, "-c", REFILLING_RM, folder, str(times)], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, campaign.root.exists()) == (code, code == 2)
    if code == 2:
        assert len(ended.stderr.splitlines()) == 1
        assert "one is not removed to the end: its workers may still run" in ended.stderr
        assert printed(capsys, "ls").splitlines()[1].split()[0] == "one"
        assert printed(capsys, "rm", "one", "--yes") == "campaign one is removed\n"


REFILLING_RM = """
import pathlib, sys
from hpcrl.campaign import directory
from hpcrl.cli import main

folder, left = sys.argv[1], int(sys.argv[2])

def refill(event, arguments):
    global left
    path = pathlib.Path(str(arguments[0])) if event == "os.rmdir" else None
    if path is not None and path.name == folder and left:
        left -= 1
        (path / f"late-{left}").touch()

directory.REMOVAL_TIMEOUT_S = 2.0 if left < 10 else 0.3
sys.addaudithook(refill)
sys.exit(main(["rm", "one", "--yes"]))
"""


@pytest.fixture
def close_folder() -> Iterator[Callable[[Path, int], None]]:
    """Restrict what may be done with a folder, until the test ends."""
    closed: list[Path] = []

    def close(folder: Path, mode: int) -> None:
        folder.chmod(mode)
        closed.append(folder)

    yield close
    for folder in closed:
        folder.chmod(0o700)


def test_a_campaign_with_files_that_may_not_be_removed_is_refused_before_anything_is(
    make_campaign: CampaignMaker, close_folder: Callable[[Path, int], None]
) -> None:
    campaign = make_campaign("one")
    job = campaign.job(0)
    job.log("env-0").touch()
    close_folder(job.logs, 0o500)
    ended = hpcrl("rm", "one", "--yes", before=BOUND_BY_MODES, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert (
        ended.stderr == f"hpcrl: campaign one cannot be removed: Permission denied ({job.logs}); nothing is removed\n"
    )
    assert job.submission.exists()


@pytest.mark.parametrize("words", [["monitor", "one", "--once"], ["events", "one"], ["rm", "one"], ["resume", "one"]])
def test_a_campaign_that_may_not_be_entered_is_refused_as_that(
    make_campaign: CampaignMaker, close_folder: Callable[[Path, int], None], words: list[str]
) -> None:
    campaign = make_campaign("one")
    close_folder(campaign.root, 0)
    ended = hpcrl(*words, before=BOUND_BY_MODES, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == f"hpcrl: {campaign.root} cannot be read: permission denied\n"


def test_the_list_of_campaigns_names_one_that_may_not_be_entered(
    make_campaign: CampaignMaker, close_folder: Callable[[Path, int], None]
) -> None:
    make_campaign("two")
    campaign = make_campaign("one")
    close_folder(campaign.root, 0)
    ended = hpcrl("ls", before=BOUND_BY_MODES)
    assert [line.split()[0] for line in ended.stdout.splitlines()] == ["name", "two"]
    assert ended.stderr == f"hpcrl: note: {campaign.root} cannot be read: permission denied\n"


def test_events_and_logs_that_cannot_be_listed_are_an_error(
    make_campaign: CampaignMaker, close_folder: Callable[[Path, int], None]
) -> None:
    campaign = make_campaign("one")
    for words, folder in ((["events", "one"], campaign.events), (["logs", "one"], campaign.job(0).logs)):
        close_folder(folder, 0o300)
        ended = hpcrl(*words, before=BOUND_BY_MODES, check=False)
        assert (ended.returncode, ended.stdout) == (2, "")
        assert ended.stderr == f"hpcrl: {folder} cannot be read: Permission denied\n"


def test_where_one_campaign_may_run_none_is_removed(
    make_campaign: CampaignMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    ended, alive = make_campaign("one"), make_campaign("two")
    alive.job(0).outcome.unlink()
    publish_json(
        alive.job(0).submission, {"id": "77", "scheduler": "slurm", "pid": None, "start_ticks": None, "time": 1.0}
    )
    assert "campaign two is " in refused(capsys, "rm", "one", "two", "--yes")
    assert ended.manifest.exists()


def test_a_comparison_shows_figures_and_the_settings_that_differ(
    make_campaign: CampaignMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    make_campaign("one")
    make_campaign("two", "rollout.group_size=4", reward=0.9)
    text = printed(capsys, "compare", "one", "two")
    assert re.search(r"reward, last steps +0\.438 +0\.788", text)
    assert re.search(r"one setting differs +one +two\nrollout\.group_size +8 +4", text)


def test_all_that_shows_a_reward_shows_the_same(
    make_campaign: CampaignMaker, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps alternate, so that the last one alone would be another figure."""
    monkeypatch.chdir(tmp_path)
    campaign = make_campaign("one")
    log = EventLog.open(campaign, "train", 0, job=0, role="train")
    rewards = [0.2, 0.1, 0.3, 0.1, 0.3, *[0.1, 0.3, 0.7, 0.9] * 8, 0.7, 0.9, 0.8, 0.7, 0.9]
    for step, reward in enumerate(rewards, start=1):
        log.emit(StepFinished(step=step, version=step, reward_mean=reward))
    log.close()
    compared = printed(capsys, "compare", "one", str(make_campaign("two").root)).splitlines()
    ends = [line.split()[-2] for line in compared if line.startswith("reward, ")]
    assert ends == ["0.200", "0.800"]
    assert re.search(r"reward .* 0\.200 -> 0\.800", printed(capsys, "monitor", "one", "--once"))
    assert "rose from 0.200 to 0.800" in hpcrl("report", "one").stdout
    assert "mean reward 0.200 -> 0.800 in 42 steps" in final_summary(campaign, state="done", rewards=rewards)[0]


def test_episodes_are_counted_by_their_status_everywhere(
    make_campaign: CampaignMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    campaign = make_campaign("one")
    log = EventLog.open(campaign, "env", 1, job=0, role="env")
    log.emit(EpisodesCounted(done=1938, truncated=750))
    log.close()
    assert "1,938 done   750 truncated" in printed(capsys, "monitor", "one", "--once")
    compared = printed(capsys, "compare", "one", str(make_campaign("two").root))
    assert re.search(r"episodes done +1,938 ", compared)
    assert re.search(r"episodes truncated +750 ", compared)


def test_a_copied_campaign_is_shown_by_the_name_that_commands_accept(
    make_campaign: CampaignMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    campaign = make_campaign("one")
    shutil.copytree(campaign.root, campaign.root.with_name("copy"))
    lines = printed(capsys, "ls").splitlines()[1:]
    assert sorted(line.split()[0] for line in lines) == ["copy", "one"]
    assert sorted(line["name"] for line in json.loads(printed(capsys, "ls", "--json"))) == ["copy", "one"]
    assert printed(capsys, "monitor", "copy", "--once").startswith("copy  ")
    assert json.loads(printed(capsys, "monitor", "copy", "--json"))["name"] == "copy"


def test_a_campaign_that_is_not_there_is_refused_with_the_nearest_and_a_folder_as_what_it_is(
    make_campaign: CampaignMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    campaign = make_campaign("evil-1")
    assert "no campaign 'evil': did you mean 'evil-1'? there are evil-1" in refused(capsys, "monitor", "evil")
    broken = campaign.root.with_name("evil-")
    broken.mkdir()
    problem = f"{broken} has no campaign.json: restore it, or remove the directory by hand; there are evil-1"
    assert problem in refused(capsys, "monitor", "evil-")
    assert problem in refused(capsys, "rm", "evil-")
    other = campaign.root.parents[1]
    assert f"{other} has no campaign.json; there are evil-1" in refused(capsys, "monitor", str(other))


@pytest.mark.parametrize("words", [["report", "one", "--json"], ["monitor", "one", "--json"], ["traj", "ls", "one"]])
def test_output_to_a_full_disk_is_refused_in_one_line(make_campaign: CampaignMaker, words: list[str]) -> None:
    make_campaign("one")
    with open("/dev/full", "w") as full:  # noqa: PTH123 - a device
        command = [sys.executable, "-m", "hpcrl.cli", *words]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("hpcrl: No space left on device: free space, or raise the quota")
    assert len(ended.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "command",
    ["ls", "ls --json", "plan quickstart --site local", "monitor one --once", "traj stats one", "events one", "--help"],
)
def test_output_that_is_closed_before_the_start_goes_nowhere(make_campaign: CampaignMaker, command: str) -> None:
    make_campaign("one")
    words = ["sh", "-c", f'exec "$0" -m hpcrl.cli {command} >&-', sys.executable]
    ended = subprocess.run(words, stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_what_names_no_group_no_file_or_no_directory_is_refused(
    make_campaign: CampaignMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    make_campaign("one")
    ended = hpcrl("traj", "ls", "one", "--group", "lake", check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "hpcrl: --group 'lake' is not DOMAIN/NUMBER, such as lake/17\n"
    for output in ("-", ""):
        assert "give the name of a file" in refused(capsys, "report", "one", "-o", output)
    with pytest.raises(SystemExit, match="2"):
        main(["init", ""])
    assert "the name is empty: give a new directory, such as my-game" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_the_end_of_a_campaign_advises_commands_with_its_own_recipe(make_campaign: CampaignMaker) -> None:
    campaign = make_campaign("one")
    publish_json(campaign.manifest, {**read_json(campaign.manifest), "source": {"recipe": "/my work/mine.toml"}})
    lines = final_summary(campaign, state="done", rewards=[0.1, 0.2])
    assert any(" plan '/my work/mine.toml' --site lab " in line for line in lines)
    assert not any("quickstart" in line for line in lines)


def test_the_list_of_campaigns_may_be_of_one_site(
    make_campaign: CampaignMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    make_campaign("one")
    assert "one" in printed(capsys, "ls", "--site", "local")
    assert printed(capsys, "ls", "--site", "lab") == "no campaigns of site lab: `hpcrl ls` lists all\n"
    assert json.loads(printed(capsys, "ls", "--site", "lab", "--json")) == []


@pytest.mark.parametrize("words", [["monitor", "one", "--once"], ["ls"]])
def test_words_between_colons_are_shown_as_they_are(
    make_campaign: CampaignMaker, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    campaign = make_campaign("one")
    publish_json(
        campaign.job(0).outcome, {"outcome": "failed", "reason": "bad_rewards:boom: raised KeyError", "time": 2.0}
    )
    assert "bad_rewards:boom: raised KeyError" in printed(capsys, *words)


def test_a_reason_is_on_one_whole_line_of_the_list_in_a_pipe(
    make_campaign: CampaignMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    make_campaign("two")
    reason = f"rank 3 failed: {'why ' * 400}end"
    publish_json(make_campaign("one").job(0).outcome, {"outcome": "failed", "reason": reason, "time": 2.0})
    lines = printed(capsys, "ls").splitlines()
    assert len(lines) == 3
    assert [line for line in lines if line.endswith(f"  {reason}")]
    assert all(line == line.rstrip() for line in lines)


@pytest.mark.parametrize(
    ("checkpoint", "start"),
    [("000002-step-000002", "job local-7 continues from step 2 (2 steps are made again)"), (None, NO_CHECKPOINT)],
)
def test_resume_names_the_step_that_the_new_job_continues_from(
    make_campaign: CampaignMaker,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    checkpoint: str | None,
    start: str,
) -> None:
    campaign = make_campaign("one")
    if checkpoint:
        (campaign.checkpoints / checkpoint).mkdir(parents=True)

    def start_next_job(name: str, **_: object) -> CampaignDir:
        record = {"id": "local-7", "scheduler": "local", "pid": 1, "start_ticks": 1, "time": 3.0}
        make_private_dir(campaign.job(1).root)
        publish_json(campaign.job(1).submission, record)
        return campaign

    monkeypatch.setattr(continuation, "resume", start_next_job)
    assert f"campaign one: {start}" in printed(capsys, "resume", "one")


def test_campaigns_of_the_same_recipe_differ_in_nothing(
    make_campaign: CampaignMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    make_campaign("one")
    make_campaign("two")
    assert "recipes and sites are the same" in printed(capsys, "compare", "one", "two")


def test_a_skeleton_plans_and_names_what_to_do_next(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = printed(capsys, "init", "my-game").splitlines()
    assert "hpcrl try my-game/recipe.toml" in "\n".join(lines)
    recipe: Recipe = make_recipe(load_table("recipes", "my-game/recipe.toml"))
    assert recipe.name == "my-game"
    assert recipe.domains["guess"].env == "my_game_env:GuessNumber"


def test_a_skeleton_replaces_nothing(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recipe.toml").touch()
    assert "exists: choose another directory" in refused(capsys, "init", str(tmp_path))


def test_a_trial_of_an_unknown_domain_is_refused_with_the_nearest(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "did you mean 'lake'? it has lake" in refused(capsys, "try", "quickstart", "--domain", "lakes")
