"""A first look leaves out most lines of counts, and shows the same as one that reads all."""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from hpcrl.campaign_dir.events import (
    EngineCounted,
    EpisodesCounted,
    JobEnded,
    SegmentScored,
    WorkerFailed,
    WorkerStarted,
)
from hpcrl.monitor import count_lines
from hpcrl.monitor.collect import SnapshotCollector
from hpcrl.monitor.count_lines import CountSampling, CountThinning, drop_superseded
from hpcrl.monitor.progress import RATE_WINDOW_S, CampaignProgress
from hpcrl.monitor.snapshot import CampaignSnapshot
from tests.support.synthetic import SyntheticCampaign

JOB_S = 400
RESTARTS = {"env-1": (95, 390), "env-2": (200,)}
"""The seconds of a job in which a worker is started again."""


@pytest.fixture
def campaign(tmp_path: Path) -> Iterator[SyntheticCampaign]:
    campaign = SyntheticCampaign(tmp_path / "lakes", workers=3)
    yield campaign
    campaign.close()


def play(campaign: SyntheticCampaign) -> None:
    """Make two jobs of three env workers and two engines, in which workers are started again and a domain breaks."""
    for job in range(2):
        campaign.submit_local(job)
        campaign.start(job=job, workers=3)
        seconds: Counter[str] = Counter()
        for second in range(1, JOB_S + 1):
            campaign.now += 1.0
            for index in range(3):
                count_episodes(campaign, f"env-{index}", seconds, second=second, job=job)
            if second % 10 == 0:
                for index in range(2):
                    load = EngineCounted(window_s=10.0, busy_share=0.25, running=2.0, kv_share=0.3, num_tokens=second)
                    campaign.emit(f"decode-{index}", load, job=job)
                campaign.emit("reward-0", SegmentScored(num=2, rewards={"lake": [0.5, second / 1000]}), job=job)
                campaign.step(40 * job + second // 10, job=job)
        if job == 0:
            campaign.emit("driver", JobEnded(outcome="drained"))
            campaign.outcome("drained")
            campaign.now += 100.0


def count_episodes(campaign: SyntheticCampaign, worker: str, seconds: Counter[str], *, second: int, job: int) -> None:
    """Count the episodes of a second; those of a new process soon have more than those of the one before."""
    if second in RESTARTS.get(worker, ()):
        campaign.emit("driver", WorkerFailed(of=worker, reason="killed"), job=job)
        campaign.emit(worker, WorkerStarted(pid=2), job=job)
        seconds[worker] = 0
    seconds[worker] += 1
    num = seconds[worker] * (1 + 40 * (second > 95 or job))
    num_broken = max(second - (JOB_S - 45), 0) if worker == "env-0" else 0
    counts = EpisodesCounted(
        running=4, done=num, aborted_stale=seconds[worker] // 50, num_tokens=11 * num, turns=2 * num,
        outcomes={"lake": {"finished": num, "exit": num // 7}, "taxi": {"env-fault": num_broken}},
        token_fates={"lake": {"trained": 9 * num, "sampling": num}},
        lengths={"done": {"8+": num, "8+tokens": 9 * num, "tokens": 9 * num}},
        loop_share=second / 1000,
    )  # fmt: skip
    campaign.emit(worker, counts, job=job)


def look(campaign: SyntheticCampaign, progress: CampaignProgress | None = None) -> CampaignSnapshot:
    return SnapshotCollector(
        campaign.directory, query=lambda ids: {}, clock=lambda: campaign.now + 0.5, progress=progress
    ).poll()


@pytest.fixture
def unthinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a report read all counts."""
    monkeypatch.setattr(count_lines, "NUM_THINNED", 1 << 40)


@pytest.mark.usefixtures("unthinned")
def test_a_first_look_shows_the_same_as_one_that_reads_all_counts(campaign: SyntheticCampaign) -> None:
    play(campaign)
    whole = look(campaign, CampaignProgress())
    assert whole.episodes.done > 10_000
    assert whole.tokens_per_s > 100
    assert [advisory.name for advisory in whole.advisories][:1] == ["domain-fails"]
    assert look(campaign) == whole


def test_a_first_look_parses_few_of_the_counts(campaign: SyntheticCampaign, monkeypatch: pytest.MonkeyPatch) -> None:
    play(campaign)
    added: Counter[type] = Counter()
    add = CampaignProgress.add
    monkeypatch.setattr(CampaignProgress, "add", lambda self, event: (added.update([type(event)]), add(self, event))[1])
    look(campaign)
    assert added[EpisodesCounted] < 2 * 3 * JOB_S / 15


def write_lines(*lines: tuple[int, str]) -> bytes:
    return b"".join(b'{"time": %d.5, "event": "%s", "done": 1}\n' % (time, kind.encode()) for time, kind in lines)


def choose_times(data: bytes) -> list[int]:
    return [int(line.split()[1].split(b".")[0]) for line in data.splitlines()]


def test_the_counts_before_a_new_process_and_those_before_the_window_of_rates_are_kept() -> None:
    lines = [(time, "episodes") for time in range(101, 181)] + [(181, "worker-started"), (182, "episodes")]
    kept = choose_times(CountSampling(now=200.0).choose(write_lines(*lines), 200.0))
    assert kept == [102, 111, 119, 127, 133, 139, 140, 150, 160, 170, 180, 181, 182]


def test_a_first_look_keeps_counts_in_intervals_that_grow_with_their_age() -> None:
    now = 90_000
    kept = choose_times(CountSampling(now=now).choose(write_lines(*((time, "episodes") for time in range(now))), now))
    ages = [now - time for time in kept if now - time >= RATE_WINDOW_S]
    assert all(older - newer <= max(0.1 * older, 1.0) + 1.0 for older, newer in pairwise(ages))
    assert len(kept) < 100


def thin(data: bytes, duration_s: float, *, now: float = 10**6, num_workers: int = 1) -> list[int]:
    return choose_times(CountThinning(duration_s=duration_s, now=now, num_workers=num_workers).choose(data, 0.0))


def test_a_report_keeps_a_line_of_counts_for_each_part_of_a_long_time_and_all_of_a_short_one() -> None:
    data = write_lines(*((time, "episodes") for time in range(1000, 1100)), (1100, "engine"), (1101, "engine"))
    assert thin(data, 400.0) == choose_times(data)
    assert len(thin(data, 6000.0)) == 10 + 2
    assert thin(data, 7e5) == [1019, 1039, 1059, 1079, 1099, 1100, 1101]


def test_a_report_keeps_fewer_lines_of_each_of_many_workers_and_the_newest_as_a_look_does() -> None:
    data = write_lines(*((time, "episodes") for time in range(100, 20_001, 20)))
    kept = thin(data, 20_000.0, num_workers=1000)
    assert len(kept) == 20_000 / 200 + 1
    running = thin(data, 20_000.0, num_workers=1000, now=20_001.0)
    assert [time for time in running if time < 18_000] == [time for time in kept if time < 18_000]
    assert len([time for time in running if time >= 18_000]) > 3 * len([time for time in kept if time >= 18_000])
    assert running[-3:] == [19_960, 19_980, 20_000]


def test_old_loads_of_an_engine_are_left_out() -> None:
    data = write_lines(*((time, "engine") for time in range(1000, 5001, 10)))
    kept = choose_times(CountSampling(now=9000.0).choose(data, 5000.0))
    assert kept[:3] == [3190, 3200, 3210]
    assert len(kept) == 182
    assert drop_superseded(data, 5000.0) == data
