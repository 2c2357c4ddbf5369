"""The monitor's output: screens and plain lines of synthetic campaigns."""

import io
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.cells import cell_len  # noqa: TID251
from rich.console import Console  # noqa: TID251

from hpcrl.campaign_dir.events import (
    CheckpointSaved,
    EngineCounted,
    EpisodesCounted,
    EvaluationFinished,
    FaultReported,
    JobStarted,
    SegmentScored,
    SegmentsRetired,
    StepFinished,
    TasksRestarted,
    VersionLoaded,
    WorkerStarted,
)
from hpcrl.monitor import view
from hpcrl.monitor.collect import SnapshotCollector
from hpcrl.monitor.keys import KeyReader
from hpcrl.monitor.pages import CampaignPages
from hpcrl.monitor.screen import StepBar, format_date, render_header, render_screen
from hpcrl.monitor.snapshot import (
    MIN_PACE_STEPS,
    CampaignSnapshot,
    DomainView,
    RoleView,
    SpoolView,
    find_bottleneck,
)
from hpcrl.monitor.view import (
    choose_pause,
    describe_changes,
    pace_looks,
    pay_for_look,
    print_campaigns,
    render_campaigns,
    show_frames,
    show_snapshot,
    survey_campaigns,
    watch_campaign,
)
from hpcrl.slurm.status import JobStatus
from hpcrl.system.files import publish_json, read_json
from hpcrl.system.terminal import draw_sparkline
from tests.support.synthetic import SyntheticCampaign

LONG = "prefill-0 failed 4 times, the last time by RuntimeError: " + "x" * 300


def terminal(width: int = 80, height: int = 24) -> Console:
    return Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)


def text_of(snapshot: CampaignSnapshot, *, width: int = 80, height: int = 24) -> list[str]:
    console = terminal(width, height)
    with console.capture() as capture:
        console.print(render_screen(snapshot, height=height))
    return [line.rstrip() for line in capture.get().splitlines()]


def collector(campaign: SyntheticCampaign) -> SnapshotCollector:
    return SnapshotCollector(
        campaign.directory,
        query=lambda ids: {i: JobStatus(id=i, state="running") for i in ids},
        clock=lambda: campaign.now,
    )


def planned(root: Path) -> SyntheticCampaign:
    return SyntheticCampaign(root / "quickstart-1", num_steps=40)


def running(root: Path) -> SyntheticCampaign:
    campaign = planned(root)
    campaign.submit()
    campaign.start(workers=3)
    for step in range(1, 21):
        campaign.now += 10
        campaign.step(step)
        campaign.emit(
            "env-0", EpisodesCounted(
                running=5, done=step * 8, num_tokens=step * 600, turns=step * 10, remote_prefills=step * 9, env_fault=1
            ),
        )  # fmt: skip
        campaign.emit("decode-0", VersionLoaded(version=step, wall_s=0.1))
    campaign.emit("driver", FaultReported(what="reward", detail=LONG))
    campaign.beat_all()
    return campaign


def done(root: Path) -> SyntheticCampaign:
    campaign = running(root)
    campaign.outcome("done", "every training step was made")
    return campaign


def failed(root: Path) -> SyntheticCampaign:
    campaign = running(root)
    campaign.outcome("failed", LONG)
    return campaign


def test_a_problem_is_a_plain_line_once(tmp_path: Path) -> None:
    campaign = running(tmp_path)
    with (campaign.directory.events / "000-train-0.jsonl").open("ab") as file:
        file.write(b"{\n")
    reading = collector(campaign)
    first = reading.poll()
    assert any("1 line of events/000-train-0.jsonl is damaged" in line for line in describe_changes(None, first))
    assert not any("damaged" in line for line in describe_changes(first, reading.poll()))


@pytest.mark.parametrize("state", [planned, running, done, failed])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 60), (132, 30)])
def test_a_screen_fits_the_terminal(
    tmp_path: Path, state: Callable[[Path], SyntheticCampaign], width: int, height: int
) -> None:
    lines = text_of(collector(state(tmp_path)).poll(), width=width, height=height)

    assert max(map(cell_len, lines)) <= width
    # A failure's reason is shown in full; everything else fits on the screen.
    assert len(lines) <= height + (5 if state is failed else 0)


def test_the_screen_shows_the_main_facts(tmp_path: Path) -> None:
    screen = "\n".join(text_of(collector(running(tmp_path)).poll()))

    for words in (
        "quickstart-1  quickstart on lab",
        "running",
        "job 123   00:03:20 elapsed   00:56:40 left",
        "20/40",
        "0.300 -> 1.800",
        "env         3/3",
        "train       3/3   83%",
        "5 running   160 done   0 truncated   0 aborted   1 failed",
        "60/s   12.0 k generated   90% of turns prefilled remotely",
        "version 20   engines serve 20   lag 0.50",
        "2.0 s a step, 0.4 s waiting",
        "layout hetjob",
        "reward: prefill-0 failed 4 times",
    ):
        assert words in screen


def test_the_header_of_a_job_that_waits_has_the_estimate_of_slurm(tmp_path: Path) -> None:
    seen = collector(running(tmp_path)).poll()
    waiting = msgspec.structs.replace(seen, detail=msgspec.structs.replace(seen.detail, start_estimate=1_800_000_000.0))
    estimate = f"starts about {format_date(1_800_000_000.0)} (Slurm's estimate)"
    assert estimate in "\n".join(text_of(waiting, width=120))
    assert estimate not in "\n".join(text_of(seen, width=120))


def test_the_reason_of_a_layout_is_not_repeated_at_each_start(tmp_path: Path) -> None:
    lines = describe_changes(None, collector(running(tmp_path)).poll())
    assert [line.split(maxsplit=1)[1] for line in lines if "layout" in line] == ["layout hetjob"]


@pytest.mark.parametrize("height", [24, 60])
def test_a_figure_is_whole_or_left_out_on_a_screen_of_20_columns(tmp_path: Path, height: int) -> None:
    lines = text_of(collector(running(tmp_path)).poll(), width=20, height=height)
    screen = " ".join(" ".join(lines).split())
    assert "0.300 -> 1.800" in screen
    assert "00:03:20 elapsed 00:56:40 left" in screen
    assert not any("\u2026" in line and any(map(str.isdigit, line)) for line in lines if "component" not in line)


def test_the_reason_of_a_failure_is_shown_in_full(tmp_path: Path) -> None:
    screen = "".join(text_of(collector(failed(tmp_path)).poll()))

    assert screen.replace("\n", "").count("x") >= 300


def test_markup_in_names_and_reasons_is_plain_text(tmp_path: Path) -> None:
    campaign = running(tmp_path)
    campaign.emit("driver", FaultReported(what="reward", detail="[bold]x[/] [/nothing] [link=x]y"))

    assert any("reward: [bold]x[/] [/nothing] [link=x]y" in line for line in text_of(collector(campaign).poll()))


def test_nodes_of_a_thousand_workers_are_summarized(tmp_path: Path) -> None:
    campaign = planned(tmp_path)
    campaign.submit()
    for index in range(1000):
        campaign.emit(f"env-{index}", WorkerStarted(node=f"nid{index:06d}", pid=1, gpus=[]))
    campaign.close()

    screen = "\n".join(text_of(collector(campaign).poll(), width=100, height=40))

    assert "1000/1000         env        nid000000 nid000001 .. nid000999 (1,000)" in screen
    assert "component 0, 1,000 x env: nid000000 nid000001 .. nid000999 (1,000)" in screen


@pytest.mark.parametrize(("width", "height"), [(20, 60), (40, 60), (80, 60), (200, 60)])
def test_roles_are_grouped_by_component_with_partition_and_number_of_nodes(
    tmp_path: Path, width: int, height: int
) -> None:
    campaign = running(tmp_path)
    plan = read_json(campaign.directory.plan)
    plan["components"][2] |= {"nodes": 4, "partition": "boost"}
    publish_json(campaign.directory.plan, plan)

    screen = text_of(collector(campaign).poll(), width=width, height=height)

    start = next(place for place, line in enumerate(screen) if line.startswith("role "))
    shown = [
        line.split(":")[0] if line.startswith("component") else line.split()[0] for line in screen[start + 1 :][:9]
    ]
    titles = ["component 0, 2 x env", "component 1, 1 x prefill", "component 2, 4 x boost", "component 3, 1 x train"]
    cut = [title if len(title) < width else f"{title[: width - 1]}\u2026" for title in titles]
    assert shown == [cut[0], "env", "reward", cut[1], "prefill", cut[2], "decode", cut[3], "train"]
    assert max(map(cell_len, screen)) <= width


def test_a_small_terminal_has_components_in_a_column(tmp_path: Path) -> None:
    screen = text_of(collector(running(tmp_path)).poll())
    heads = next(line for line in screen if line.startswith("role ")).split()
    assert heads[-2:] == ["component", "nodes"]
    assert any(line.endswith("0, 2 x env      env0") for line in screen if line.startswith("env "))
    assert len(screen) <= 24


def show_reward_row(campaign: SyntheticCampaign) -> list[str]:
    lines = text_of(collector(campaign).poll(), height=60)
    return [line for line in lines if line.startswith("reward  ")][-1].split()


def start_without_rewards(root: Path) -> SyntheticCampaign:
    campaign = planned(root)
    campaign.submit()
    campaign.emit("driver", JobStarted(slurm_id="123", end_time=campaign.now + 3600))
    campaign.emit("env-0", WorkerStarted(pid=1, gpus=[]))
    return campaign


def test_rewards_that_env_workers_write_are_shown_there(tmp_path: Path) -> None:
    campaign = start_without_rewards(tmp_path)
    campaign.emit("env-0", SegmentScored(num=2, rewards={"sums": [0.0, 1.0]}))
    assert show_reward_row(campaign)[1:4] == ["in", "env", "0"]
    assert collector(campaign).poll().roles["reward"].done_by == "env"
    campaign.outcome("done")
    assert show_reward_row(campaign)[1:3] == ["in", "env"]


def test_reward_workers_that_are_scaled_to_zero_are_idle_until_something_waits(tmp_path: Path) -> None:
    campaign = start_without_rewards(tmp_path)
    for block in range(3):
        campaign.emit(f"reward-100{block}000", WorkerStarted(pid=1, gpus=[]))
        campaign.emit(f"reward-100{block}000", SegmentScored(num=1, rewards={"sums": [1.0]}))
    assert show_reward_row(campaign)[1:3] == ["3/3", "0"]
    campaign.now += 600
    campaign.beat("000-env-0")
    campaign.beat("000-driver")
    assert show_reward_row(campaign)[1:3] == ["idle", "0"]
    campaign.segment("rollouts", 1, 8)
    assert show_reward_row(campaign)[1:3] == ["0/1", "8"]


def test_a_plan_of_one_component_has_no_titles(tmp_path: Path) -> None:
    campaign = running(tmp_path)
    plan = read_json(campaign.directory.plan)
    plan["components"] = [{"index": 0, "partition": "all", "roles": ["env", "reward", "prefill", "decode", "train"]}]
    publish_json(campaign.directory.plan, plan)
    assert not any("component" in line for line in text_of(collector(campaign).poll(), height=60))


def test_a_terminal_without_unicode_gets_ascii(tmp_path: Path) -> None:
    out = io.TextIOWrapper(io.BytesIO(), "ascii")

    show_snapshot(collector(failed(tmp_path)).poll(), console=Console(file=out, width=80))

    out.seek(0)
    assert "quickstart-1" in out.read()


@pytest.mark.parametrize(
    ("values", "width", "bars"),
    [
        ([], 10, ""),
        ([1.0], 10, "0"),
        ([5.0, 5.0, 5.0], 10, "000"),
        ([0.0, 1.0], 10, "07"),
        ([1.0, 0.0], 10, "70"),
        ([0.0, 0.0, 4.0, 4.0, 8.0, 8.0], 3, "047"),
        ([float(n) for n in range(8)], 8, "01234567"),
    ],
)
def test_a_sparkline_shows_the_series(values: list[float], width: int, bars: str) -> None:
    assert draw_sparkline(values, width=width, blocks="01234567") == bars


def test_plain_lines_are_printed_only_for_changes(tmp_path: Path) -> None:
    campaign = running(tmp_path)
    reading = collector(campaign)
    first = reading.poll()
    second = reading.poll()
    campaign.step(21)
    third = reading.poll()
    campaign.step(22)
    fourth = reading.poll()
    campaign.emit("train-0", CheckpointSaved(step=22, version=22, wall_s=0.1))

    assert describe_changes(None, first)[-1].split()[1:4] == ["running", "step", "20/40"]
    assert describe_changes(first, second) == []
    assert describe_changes(second, third) == []
    assert [line.split()[3] for line in describe_changes(third, fourth)] == ["22/40"]
    assert [line.split(maxsplit=1)[1] for line in describe_changes(fourth, reading.poll())] == [
        "checkpoint at step 22 (version 22)"
    ]


def test_a_start_is_shown_worker_by_worker(tmp_path: Path) -> None:
    campaign = planned(tmp_path)
    campaign.submit()
    campaign.emit("driver", JobStarted(slurm_id="123", end_time=campaign.now + 3600))
    reading = collector(campaign)
    seen, shown = None, []
    for worker in ("driver", "train-0", "prefill-0", "decode-0", "env-0"):
        if worker != "driver":
            campaign.emit(worker, WorkerStarted(pid=1, gpus=[]))
        campaign.beat_all()
        snapshot = reading.poll()
        shown += [line.split("  ")[-1] for line in describe_changes(seen, snapshot)]
        seen = snapshot

    assert shown[1:4] == [f"{num} of 4 workers have started" for num in (0, 1, 2)]
    assert "started" not in shown[-1]


def test_lines_contain_only_notes_that_are_still_kept(tmp_path: Path) -> None:
    campaign = running(tmp_path)
    reading = collector(campaign)
    before = reading.poll()
    for number in range(200):
        campaign.emit("env-0", TasksRestarted(num=number))

    lines = describe_changes(before, reading.poll())

    assert len(lines) == 50
    assert lines[-1].endswith("199 tasks of 000-env-0 that were in flight are started again")


def test_checkpoints_are_one_line_of_the_list_and_each_is_printed(tmp_path: Path) -> None:
    campaign = running(tmp_path)
    reading = collector(campaign)
    seen, printed = reading.poll(), []
    campaign.emit("env-0", TasksRestarted(num=3))
    for number in range(21, 81):
        campaign.emit("train-0", CheckpointSaved(step=number, version=number))
        campaign.emit("train-0", SegmentsRetired(num=8))
        snapshot = reading.poll()
        printed += describe_changes(seen, snapshot)
        seen = snapshot

    assert [note.line for note in seen.detail.notes][-3:] == [
        "3 tasks of 000-env-0 that were in flight are started again",
        "checkpoint at step 80 (version 80), the last of 60",
        "8 trajectories left the spools, the last of 60",
    ]
    assert sum("checkpoint at step" in line for line in printed) == 60


def test_faults_of_one_cause_are_a_line_for_each_power_of_ten_and_one_on_the_screen(tmp_path: Path) -> None:
    campaign = running(tmp_path)
    reading = collector(campaign)
    before = reading.poll()
    lines: list[str] = []
    for number in range(100):
        campaign.emit("env-0", FaultReported(what="env-fault", detail=f"lake/{number}/0: step 0: RuntimeError: broken"))
        after = reading.poll()
        lines += describe_changes(before, after)
        before = after

    assert [line.partition(" ")[2] for line in lines] == [
        "env-fault: lake/0/0: step 0: RuntimeError: broken",
        "10 x env-fault: lake/9/0: step 0: RuntimeError: broken",
        "100 x env-fault: lake/99/0: step 0: RuntimeError: broken",
    ]
    assert sum("RuntimeError: broken" in line for line in text_of(before, height=60)) == 1


def test_without_a_terminal_lines_are_printed_until_the_campaign_ends(tmp_path: Path) -> None:
    out = io.StringIO()

    last = watch_campaign(collector(done(tmp_path)), console=Console(file=out), until_done=True, interval_s=0.01)

    assert last.state == "done"
    assert "\x1b" not in out.getvalue()
    assert "done     step 20/40  reward 1.800" in out.getvalue().splitlines()[-1]


def test_on_a_terminal_the_last_screen_stays(tmp_path: Path) -> None:
    console = terminal()

    last = watch_campaign(collector(done(tmp_path)), console=console, until_done=True, interval_s=0.01)

    assert last.state == "done"
    assert isinstance(console.file, io.StringIO)
    assert "every training step was made" in console.file.getvalue()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_an_interrupt_ends_watching_and_reports_that_the_campaign_continues(tmp_path: Path, is_terminal: bool) -> None:
    campaign = running(tmp_path)
    polls = iter(range(3))

    def clock() -> float:
        if next(polls) == 2:
            raise KeyboardInterrupt
        return campaign.now

    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=120)
    reading = SnapshotCollector(campaign.directory, query=lambda ids: {}, clock=clock)

    last = watch_campaign(reading, console=console, until_done=True, interval_s=0.01)

    assert last.state == "running"
    assert isinstance(console.file, io.StringIO)
    message = "quickstart-1 continues: `hpcrl monitor quickstart-1` shows it again, `hpcrl stop quickstart-1` ends it\n"
    assert console.file.getvalue().endswith(message)
    assert not campaign.directory.stop.exists()


@pytest.mark.parametrize(("spent_s", "pause_s"), [(0.0005, 0.25), (0.02, 2.0), (0.2, 5.0)])
def test_what_takes_long_is_repeated_more_rarely(spent_s: float, pause_s: float) -> None:
    assert choose_pause(spent_s, share=0.01, interval_s=0.25) == pytest.approx(pause_s)


@pytest.mark.parametrize(
    ("looks_s", "interval_s"), [([0.002], 0.25), ([0.001, 0.001, 0.001, 0.006], 0.25), ([0.03], 2.4), ([9.0], 5.0)]
)
def test_looks_use_their_share_of_a_core_on_average(looks_s: list[float], interval_s: float) -> None:
    """One that takes three times as long as most does not make looks rarer while their mean is cheap."""
    now, paid_until, times = 100.0, float("-inf"), []
    for look_s in looks_s * 100:
        times.append(now)
        paid_until = pay_for_look(look_s, now=now, paid_until=paid_until)
        now = max(now + 0.25, paid_until)
    assert (times[-1] - times[-41]) / 40 == pytest.approx(interval_s)


def test_a_first_look_that_takes_long_delays_no_second_one() -> None:
    looked_at = 1000.0
    assert pay_for_look(9.0, now=looked_at, paid_until=float("-inf")) == looked_at


def test_a_key_that_ends_a_wait_starts_no_look_before_its_time(tmp_path: Path) -> None:
    campaign = running(tmp_path)
    reading = collector(campaign)
    num_looks = 0

    class Counted:
        def look(self) -> bool:
            nonlocal num_looks
            num_looks += 1
            return reading.look()

        def build(self) -> CampaignSnapshot:
            return reading.build()

    snapshots = pace_looks(Counted(), interval_s=1000.0, wait=lambda _: None)
    first = next(snapshots)
    assert all(next(snapshots) is first for _ in range(9))
    assert num_looks == 1


@pytest.mark.parametrize("has_new_step", [True, False])
def test_a_screen_is_drawn_again_when_a_step_was_made_and_not_at_every_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_new_step: bool
) -> None:
    monkeypatch.setattr(view, "CLOCK_INTERVAL_S", 1000.0)
    monkeypatch.setattr(view, "MAX_NEWS_SHARE", 1000.0)
    monkeypatch.setattr(view, "MAX_LOOK_SHARE", 1000.0)
    campaign = running(tmp_path)
    reading = collector(campaign)
    console = terminal()
    num_looks = 0

    def wait(seconds: float) -> None:
        nonlocal num_looks
        num_looks += 1
        campaign.emit("env-0", EpisodesCounted(done=num_looks))
        if num_looks == 20 and has_new_step:
            campaign.step(21)
        if num_looks == 40:
            raise KeyboardInterrupt
        time.sleep(0.01)

    show_frames(pace_looks(reading, interval_s=0.0, wait=wait), console, KeyReader(), CampaignPages(reading))

    assert isinstance(console.file, io.StringIO)
    frames = console.file.getvalue().split("elapsed")[1:]
    assert len({frame.partition("reward")[0] for frame in frames}) == 1 + has_new_step
    assert ("21/40" in console.file.getvalue()) == has_new_step


def test_campaigns_are_listed_for_people_and_for_scripts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    campaign = done(tmp_path)

    assert print_campaigns([campaign.directory], as_json=False) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:3] == ["quickstart-1", "lab", "done"]
    assert print_campaigns([campaign.directory], as_json=True) == 0
    assert '"state": "done"' in capsys.readouterr().out
    assert print_campaigns([], as_json=False) == 0
    assert capsys.readouterr().out.startswith("no campaigns yet")


def test_the_time_of_the_other_steps_is_estimated_by_the_pace_of_recent_ones(tmp_path: Path) -> None:
    campaign = SyntheticCampaign(tmp_path / "slow", num_steps=500)
    campaign.submit()
    campaign.start()
    reading = collector(campaign)
    seen = {}
    for step in range(1, 41):
        campaign.now += 100.0 if step < 10 else 10.0
        campaign.step(step)
        seen[step] = reading.poll().detail.training_left_s
    assert [seen[step] for step in (1, MIN_PACE_STEPS)] == [None, None]
    assert seen[MIN_PACE_STEPS + 1] == pytest.approx(100.0 * (500 - MIN_PACE_STEPS - 1))
    assert seen[40] == pytest.approx(10.0 * (500 - 40))
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(render_screen(reading.poll()))
    assert "40/500, about 77 min more" in console.export_text()
    campaign.now += 2000.0
    campaign.step(41)
    assert reading.poll().detail.training_left_s == pytest.approx(12.5 * (500 - 41)), "one long pause counts little"
    campaign.now -= 1e6
    campaign.step(42)
    left_s = reading.poll().detail.training_left_s
    assert left_s is None or left_s >= 0.0, "a clock was set back"
    campaign.close()


def test_figures_of_long_ago_are_not_shown_as_those_of_now(tmp_path: Path) -> None:
    """As on a full disk: nothing moves, and no event can be written."""
    campaign = running(tmp_path)
    campaign.emit("decode-0", EngineCounted(window_s=10.0, busy_share=0.9, num_tokens=500))
    reading = collector(campaign)
    seen = []
    for wait_s in (0.0, 1000.0):
        campaign.now += wait_s
        campaign.beat_all()
        seen.append(reading.poll())
    now, later = seen
    assert [now.roles[role].busy_share for role in ("train", "decode")] == [0.833, 0.9]
    assert now.detail.training_left_s == pytest.approx(200.0)
    assert [later.roles[role].busy_share for role in ("train", "decode")] == [None, None]
    assert later.roles["train"].alive == 3
    assert later.detail.training_left_s is None


@pytest.mark.parametrize("columns", [40, 80])
def test_a_campaign_that_did_not_train_everything_is_not_shown_as_done(tmp_path: Path, columns: int) -> None:
    campaign = running(tmp_path)
    campaign.emit("env-0", EpisodesCounted(outcomes={"sums": {"exit": 20}}))
    why = "domain sums: all 20 episodes failed, so it trains nothing"
    campaign.outcome("done", f"every step was made, but not everything was trained: {why}", untrained=[why])
    console = terminal(columns)
    with console.capture() as listed:
        console.print(render_campaigns(survey_campaigns([campaign.directory], problems=[]), width=columns))
    with console.capture() as header:
        console.print(render_header(collector(campaign).poll()))
    for text in (" ".join(listed.get().split()), " ".join(header.get().split())):
        assert " partial " in text
        assert "sums" in text
    assert any(" partial  step 20/40" in line for line in describe_changes(None, collector(campaign).poll()))


def test_a_campaign_that_is_done_before_its_last_step_is_listed_with_the_reason(tmp_path: Path) -> None:
    campaign = running(tmp_path)
    why = "the mean reward of 3 steps is 0.9 (limits.reward = 0.8)"
    campaign.outcome("done", why, cause="goal-reached")
    (line,) = survey_campaigns([campaign.directory], problems=[])
    assert (line.state, line.reason) == ("done", why)
    campaign.outcome("done", "every training step was made", cause="complete")
    (line,) = survey_campaigns([campaign.directory], problems=[])
    assert (line.state, line.reason) == ("done", "")


@pytest.mark.parametrize("columns", [20, 40, 80, 200])
def test_a_failed_campaign_is_listed_with_its_reason_in_a_list_of_any_width(tmp_path: Path, columns: int) -> None:
    campaign = running(tmp_path)
    campaign.outcome("failed", "the reward function raised KeyError: 'answer'")
    lines = survey_campaigns([campaign.directory, planned(tmp_path / "other").directory], problems=[])
    console = terminal(columns)
    with console.capture() as capture:
        console.print(render_campaigns(lines, width=columns), soft_wrap=True)
    listed = capture.get()
    assert "quickstart-1" in listed
    assert " ".join(listed.split()).count("KeyError: 'answer'") == 1


@pytest.mark.parametrize("columns", [40, 80])
def test_a_long_reason_is_whole_in_the_list_on_a_terminal(tmp_path: Path, columns: int) -> None:
    campaign = running(tmp_path)
    campaign.outcome("failed", f"{LONG}. It is in the last word: KeyError")
    lines = survey_campaigns([campaign.directory], problems=[])
    console = terminal(columns)
    with console.capture() as capture:
        console.print(render_campaigns(lines, width=columns), soft_wrap=True)
    text = "".join(capture.get().split())
    assert "x" * 300 in text
    assert text.endswith("lastword:KeyError")


def test_a_failed_campaign_has_its_reason_in_the_list_for_scripts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    campaign = running(tmp_path)
    campaign.outcome("failed", "the reward function raised KeyError: 'answer'")
    print_campaigns([campaign.directory], as_json=True)
    (line,) = json.loads(capsys.readouterr().out)
    assert line["reason"] == "the reward function raised KeyError: 'answer'"


def test_rewards_are_shown_by_domain_where_there_are_several(tmp_path: Path) -> None:
    campaign = running(tmp_path)
    campaign.emit("reward-0", SegmentScored(num=3, rewards={"sums": [1.0, 0.0], "game": [-1.0]}))
    campaign.emit("reward-1", SegmentScored(num=1, rewards={"sums": [0.5]}))

    shown = "domains   game -1.000 (last 1 of 1)   sums 0.500 (last 3 of 3)"
    assert any(shown in line for line in text_of(collector(campaign).poll()))


def test_a_single_domain_has_no_separate_line(tmp_path: Path) -> None:
    campaign = running(tmp_path)
    campaign.emit("reward-0", SegmentScored(num=1, rewards={"sums": [1.0]}))

    assert not any(line.startswith("domains") for line in text_of(collector(campaign).poll()))


def test_evaluations_have_a_separate_line(tmp_path: Path) -> None:
    campaign = running(tmp_path)
    assert not any("held out" in line for line in text_of(collector(campaign).poll()))
    for number, mean in enumerate((0.1, 0.8, 0.5)):
        campaign.emit("env-0", EvaluationFinished(number=number, version=10 * number, reward_mean=mean, num_episodes=8))
    lines = text_of(collector(campaign).poll())
    (line,) = [line for line in lines if line.startswith("held out")]
    assert line.endswith("0.500, best 0.800 at version 10")
    assert len(lines) <= 24


def test_a_reward_function_that_always_fails_is_shown(tmp_path: Path) -> None:
    """An episode whose reward failed counts once, whichever of its two events comes first."""
    campaign = running(tmp_path)
    campaign.emit("reward-0", SegmentScored(num=8, rewards={"sums": [0.0] * 8}, reward_errors={"sums": 8}))
    campaign.emit("env-1", EpisodesCounted(outcomes={"sums": {"finished": 7, "max-turns": 3}}))
    snapshot = collector(campaign).poll()
    assert snapshot.domains["sums"].outcomes == {"reward-error": 8, "max-turns": 2}
    assert any("80.0% reward-error" in line and "may be broken" in line for line in text_of(snapshot, width=140))


def test_episodes_that_wait_for_a_reward_are_not_shown_as_good_ones_of_a_domain_that_fails(tmp_path: Path) -> None:
    campaign = running(tmp_path)
    campaign.emit("reward-0", SegmentScored(num=8, rewards={"sums": [0.0] * 8}, reward_errors={"sums": 8}))
    campaign.emit("env-1", EpisodesCounted(outcomes={"sums": {"finished": 7, "max-turns": 3}}))
    assert any("80.0% reward-error, 20.0% unscored" in line for line in text_of(collector(campaign).poll(), width=140))
    scored = SegmentScored(num=2, rewards={"sums": [1.0, 0.0, 1.0]}, reward_errors={"sums": 1})
    campaign.emit("reward-0", scored)
    snapshot = collector(campaign).poll()
    assert snapshot.domains["sums"].outcomes == {"reward-error": 9, "max-turns": 1}
    assert any("90.0% reward-error, 10.0% max-turns" in line for line in text_of(snapshot, width=140))


def test_an_episode_whose_reward_failed_is_not_counted_under_the_outcome_that_it_had(tmp_path: Path) -> None:
    campaign = running(tmp_path)
    campaign.emit("env-1", EpisodesCounted(outcomes={"sums": {"finished": 43, "max-turns": 533}}))
    scored = SegmentScored(
        num=13,
        rewards={"sums": [0.0] * 13},
        reward_errors={"sums": 13},
        replaced_outcomes={"sums": {"max-turns": 13}},
    )
    campaign.emit("reward-0", scored)
    snapshot = collector(campaign).poll()
    assert snapshot.domains["sums"].outcomes == {"max-turns": 520, "finished": 43, "reward-error": 13}


def test_a_low_share_of_trained_tokens_is_shown_with_its_reason(tmp_path: Path) -> None:
    campaign = running(tmp_path)
    fates = {"chat": {"trained": 100}, "tools": {"trained": 80, "sampling": 15, "aborted-stale": 5}}
    campaign.emit("env-1", EpisodesCounted(token_fates=fates))
    snapshot = collector(campaign).poll()
    (line,) = [line for line in text_of(snapshot, width=140) if line.startswith("trained")]
    low = "tools only 80.0% of tokens: 15.0% sampled otherwise than training assumes, 5.0% aborted as stale"
    assert line.split(None, 1)[1] == f"{low}   chat 100.0% of tokens"
    assert f"trained: {low}" in describe_changes(None, snapshot)[-1]


def test_a_domain_that_needs_a_look_is_a_line_once_and_not_in_each_line_of_steps(tmp_path: Path) -> None:
    campaign = running(tmp_path)
    watched = collector(campaign)
    before = watched.poll()
    campaign.emit("env-1", EpisodesCounted(outcomes={"sums": {"exit": 15, "finished": 5}}))
    first = watched.poll()
    assert [line.split(maxsplit=1)[1] for line in describe_changes(before, first) if "outcomes: sums" in line] == [
        "outcomes: sums 75.0% exit, 25.0% finished: its program or its reward may be broken"
    ]
    campaign.emit("train-0", StepFinished(step=40, version=40))
    (line,) = [line for line in describe_changes(first, watched.poll()) if "step 40/40" in line]
    assert "sums" not in line


def test_an_event_loop_that_is_the_limit_is_shown_with_what_helps(tmp_path: Path) -> None:
    campaign = running(tmp_path)
    campaign.emit("env-0", EpisodesCounted(running=2, loop_share=0.3))
    assert not [line for line in text_of(collector(campaign).poll()) if line.startswith("env loop")]
    campaign.emit("env-0", EpisodesCounted(running=3, loop_share=0.93, loop_delay_s=0.4))
    (line,) = [line for line in text_of(collector(campaign).poll(), width=120) if line.startswith("env loop")]
    assert "93% of a core, calls wait up to 0.4 s: raise resources.env.num_workers" in line


def test_one_frame_has_every_text_whole_and_a_live_screen_the_end_of_the_newest_fault(tmp_path: Path) -> None:
    campaign = running(tmp_path)
    campaign.emit("driver", FaultReported(what="reward", detail=f"{LONG} then correct the function"))
    campaign.emit("env-0", EpisodesCounted(lengths={"done": {"512+": 10, "512+tokens": 5200, "tokens": 5200}}))
    snapshot = collector(campaign).poll()
    for console in (Console(file=io.StringIO(), width=80, height=24, color_system=None), terminal()):
        with console.capture() as capture:
            show_snapshot(snapshot, console=console)
        printed = "".join(line.strip() for line in capture.get().splitlines())
        assert LONG.partition("x")[0].replace(" ", "") in printed.replace(" ", "")
        assert "x" * 300 in printed
        assert "then correct the function" in printed
        assert chr(0x2026) not in printed
    assert "then correct the function" in "".join(map(str.strip, text_of(snapshot))), (
        "the end of the newest fault is seen"
    )


def test_an_advisory_is_shown_once_in_lines_and_first_on_the_screen(tmp_path: Path) -> None:
    campaign = running(tmp_path)
    watched = collector(campaign)
    before = watched.poll()
    campaign.emit("env-1", EpisodesCounted(outcomes={"sums": {"exit": 20}}))
    campaign.now += 10
    after = watched.poll()

    lines = [
        line for line in describe_changes(before, after) if "critical: domain sums: all 20 episodes failed" in line
    ]
    assert len(lines) == 1
    assert describe_changes(after, after) == []
    screen = text_of(after)
    assert next(line for line in screen if "critical" in line).split()[:3] == ["critical", "domain", "sums:"]
    assert len(screen) <= 24


def test_the_load_of_roles_and_the_bottleneck_are_shown(tmp_path: Path) -> None:
    campaign = running(tmp_path)
    load = EngineCounted(
        window_s=10.0, version=3, busy_share=0.9, running=4.0, waiting=7.0, num_tokens=500, kv_share=0.5
    )
    campaign.emit("decode-0", load)
    for step in range(21, 41):
        campaign.emit("train-0", StepFinished(step=step, step_s=2.0, wait_s=8.0, lag_mean=0.5, lags={"0": 1, "1": 3}))
    screen = text_of(collector(campaign).poll())

    heads = next(line for line in screen if line.startswith("role")).split()
    assert heads[:7] == ["role", "alive", "busy", "queue", "tokens/s", "kv", "version"]
    assert next(line for line in screen if line.startswith("decode")).split()[2:7] == ["90%", "7", "50", "50%", "3"]
    assert next(line for line in screen if line.startswith("train ")).split()[2] == "20%"
    assert any(line.startswith("waiting") and line.endswith("bottleneck: decode") for line in screen)
    assert any("lag 0.50 (0: 25%, 1: 75%)" in line for line in screen)


@pytest.mark.parametrize(
    ("train", "decode", "num_rollouts", "role"),
    [
        ({"busy_share": 0.9}, {"busy_share": 0.9}, 0, "train"),
        ({"busy_share": 0.2}, {"busy_share": 0.9}, 100, "reward"),
        ({"busy_share": 0.2}, {"busy_share": 0.9}, 0, "decode"),
        ({"busy_share": 0.2}, {"busy_share": 0.9, "is_nearly_empty": True}, 0, "env"),
        ({"busy_share": 0.2}, {"busy_share": 0.5}, 0, "env"),
        ({"busy_share": 0.2}, {}, 0, ""),
        ({}, {"busy_share": 0.9}, 0, ""),
    ],
)
def test_the_bottleneck_is_the_role_that_the_others_wait_for(
    train: dict[str, Any], decode: dict[str, Any], num_rollouts: int, role: str
) -> None:
    roles = {name: RoleView(workers=1, alive=1, **load) for name, load in (("train", train), ("decode", decode))}
    assert find_bottleneck(roles, [SpoolView(name="rollouts", depth=num_rollouts)]) == role


def test_engines_that_have_one_request_for_hundreds_of_places_are_not_the_bottleneck(tmp_path: Path) -> None:
    campaign = running(tmp_path)
    load = {"window_s": 10.0, "version": 3, "busy_share": 1.0, "waiting": 0.0, "num_tokens": 500, "num_places": 256}
    for step in range(21, 41):
        campaign.emit("train-0", StepFinished(step=step, step_s=2.0, wait_s=8.0))
    for running_now, role in ((1.3, "env"), (200.0, "decode")):
        for _ in range(60):
            campaign.emit("decode-0", EngineCounted(running=running_now, **load))
        waiting = next(line for line in text_of(collector(campaign).poll()) if line.startswith("waiting"))
        assert waiting.endswith(f"bottleneck: {role}")


def test_domains_without_a_reward_so_far_have_no_row(tmp_path: Path) -> None:
    domain = DomainView(
        scored=0, reward_mean=None, reward_recent=None, trained_share=None, token_fates={}, outcomes={}, failed=0
    )
    domains = {"lake": domain, "taxi": domain}
    shown = text_of(msgspec.structs.replace(collector(running(tmp_path)).poll(), domains=domains))
    assert not any(line.startswith("domains") for line in shown)


def test_workers_of_a_job_that_has_ended_are_not_called_alive(tmp_path: Path) -> None:
    rows = [line.split() for line in text_of(collector(done(tmp_path)).poll()) if line]
    assert ["role", "workers"] in [row[:2] for row in rows]
    assert ["decode", "3"] in [row[:2] for row in rows]
    assert not any("alive" in row for row in rows)


@pytest.mark.parametrize("width", [20, 40, 200])
def test_a_screen_fits_any_width(tmp_path: Path, width: int) -> None:
    campaign = running(tmp_path)
    campaign.emit("env-1", EpisodesCounted(outcomes={"sums": {"exit": 20}}))
    campaign.emit("decode-0", EngineCounted(window_s=10.0, busy_share=0.9, num_tokens=500))
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(render_screen(collector(campaign).poll()))
    assert max(map(len, console.file.getvalue().splitlines())) <= width


@pytest.mark.parametrize(("encoding", "done", "rest"), [("utf-8", "━", "┄"), ("ascii", "-", ".")])
def test_the_bar_of_steps_is_read_without_colours(encoding: str, done: str, rest: str) -> None:
    """Colours are there, but not everybody sees them."""
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    Console(file=file, width=40, force_terminal=True, color_system="standard").print(StepBar(total=4, completed=1))
    file.flush()
    text = re.sub(r"\x1b\[[0-9;]*m", "", raw.getvalue().decode(encoding)).strip()
    assert (text.count(done), text.count(rest)) == (10, 30)
