"""Events never end work: they wait while a file system is full or away, and what was dropped is reported."""

import itertools

import pytest

from hpcrl.campaign_dir import event_log
from hpcrl.campaign_dir.event_log import MAX_PENDING_LINES, EventLog, EventReader, LookSchedule, choose_kinds
from hpcrl.campaign_dir.events import CheckpointSaved, EpisodesCounted, EventsLost, WorkerStarted
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.monitor.count_lines import drop_superseded
from hpcrl.system import file_watch
from tests.support.clocks import SettableClock
from tests.support.disks import largest_file


def saved(steps) -> list[CheckpointSaved]:
    return [CheckpointSaved(step=step) for step in steps]


def read_steps(directory) -> list[int]:
    return [event.step for event in EventReader(directory).poll() if isinstance(event, CheckpointSaved)]


@pytest.fixture
def log(tmp_path):
    return EventLog(tmp_path / "w.jsonl", job=0, role="train", worker="w")


@pytest.mark.parametrize("room", [0, 10])
def test_events_wait_while_the_disk_is_full_and_are_written_in_order(log, tmp_path, room):
    log.emit(CheckpointSaved(step=0))
    with largest_file(log.path.stat().st_size + room):  # with some room, the next line is torn
        for event in saved(range(1, 4)):
            log.emit(event)
        assert read_steps(tmp_path) == [0]
    log.emit(CheckpointSaved(step=4))
    assert read_steps(tmp_path) == [0, 1, 2, 3, 4]


def test_a_heartbeat_writes_what_waits(log, tmp_path):
    with largest_file(0):
        log.emit(CheckpointSaved(step=1))
    log.beat()
    assert read_steps(tmp_path) == [1]


def test_the_oldest_events_are_dropped_and_counted_when_too_many_wait(log, tmp_path):
    with largest_file(0):
        for event in saved(range(MAX_PENDING_LINES + 5)):
            log.emit(event)
    log.emit(CheckpointSaved(step=9999))
    events = list(EventReader(tmp_path).poll())
    (lost,) = [event for event in events if isinstance(event, EventsLost)]
    assert (lost.num, lost.reason) == (6, "File too large")
    assert read_steps(tmp_path) == [*range(6, MAX_PENDING_LINES + 5), 9999]


def test_a_log_that_cannot_be_opened_is_opened_later(tmp_path):
    campaign = CampaignDir(tmp_path)
    log = EventLog.open(campaign, "train", 0, job=0, role="train")
    log.emit(CheckpointSaved(step=1))
    campaign.events.mkdir()
    log.emit(CheckpointSaved(step=2))
    log.close()
    assert read_steps(campaign.events) == [1, 2]


def test_a_sparing_reader_leaves_the_files_of_ended_jobs_alone(tmp_path):
    reader = EventReader(tmp_path, is_sparing=True)
    logs = [EventLog(tmp_path / f"{job:03d}-train-0.jsonl", job=job, role="train", worker="w") for job in range(2)]
    for log in logs:
        log.emit(CheckpointSaved(step=1))
    assert len(list(reader.poll())) == 2
    reader.ended_jobs = frozenset({0})
    for log in logs:
        log.emit(CheckpointSaved(step=2))
    assert [event.job for event in reader.poll()] == [1]


@pytest.mark.parametrize(("num_files", "interval_s"), [(100, 0), (500, 1), (2100, 5), (20000, 5)])
def test_each_of_very_many_files_is_looked_at_more_rarely(num_files, interval_s):
    clock = SettableClock()
    schedule = LookSchedule(clock=clock)
    names = [f"000-env-{number}.jsonl" for number in range(num_files)]
    schedule.follow(names, listed=frozenset(names))
    assert schedule.take_due() == sorted(names)
    for name in names:
        schedule.note_change(name)
    clock.now = max(interval_s - 0.01, 0.0)
    assert schedule.take_due() == ([] if interval_s else sorted(names))
    clock.now = interval_s
    assert schedule.take_due() == sorted(names)


def test_files_of_ended_jobs_do_not_make_looks_rarer(tmp_path, monkeypatch):
    monkeypatch.setattr(event_log, "NUM_FREE_LOOKS", 1)
    reader = EventReader(tmp_path, is_sparing=True, ended_jobs=frozenset({0}))
    for job, worker in ((0, 0), (0, 1), (0, 2), (1, 0)):
        EventLog(tmp_path / f"{job:03d}-env-{worker}.jsonl", job=job, role="env", worker="w").emit(count(1))
    assert len(list(reader.poll())) == 1
    EventLog(tmp_path / "001-env-0.jsonl", job=1, role="env", worker="w").emit(count(2))
    assert len(list(reader.poll())) == 1, "this file is looked at each time"


def test_a_file_that_cannot_be_read_is_named_until_it_can_be_or_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(event_log, "NUM_FREE_LOOKS", 0)  # so that it is not looked at each time
    monkeypatch.setattr(event_log, "MAX_LOOKS_PER_S", 1e-3)
    bad = tmp_path / "000-env-0.jsonl"
    bad.symlink_to(bad)
    reader = EventReader(tmp_path, is_sparing=True)
    for _ in range(3):
        assert list(reader.poll_merged()) == []
        assert list(reader.unreadable) == [bad.name]
    bad.unlink()
    reader.expect_change()
    list(reader.poll_merged())
    assert reader.unreadable == {}


def test_a_reader_of_some_kinds_parses_no_other(log, tmp_path):
    for event in (CheckpointSaved(step=1), count(1), WorkerStarted(pid=1)):
        log.emit(event)
    reader = EventReader(tmp_path, choose_lines=choose_kinds(["checkpoint", "worker-started"]))
    assert [type(event) for event in reader.poll()] == [CheckpointSaved, WorkerStarted]


def test_a_file_that_does_not_change_is_looked_at_ever_more_rarely_and_a_new_one_at_once(monkeypatch):
    monkeypatch.setattr(file_watch, "PAUSE_SHARE", 0.1)
    clock = SettableClock()
    schedule = LookSchedule(clock=clock)
    schedule.follow(["a"], listed=frozenset("a"))
    looks = []
    for clock.now in range(200):
        if schedule.take_due():
            looks.append(clock.now)
    assert looks[:13] == [*range(12), 13], "after more than 10 s without a change, every 2 s, and so on"
    assert [later - earlier for earlier, later in itertools.pairwise(looks[-5:])] == [5, 5, 5, 5]
    schedule.follow(["a", "b"], listed=frozenset("ab"))
    assert schedule.take_due() == ["b"]
    schedule.follow(["a"], listed=frozenset("a"))
    clock.now = 1000
    assert schedule.take_due() == ["a"]


def test_a_file_that_changes_rarely_is_looked_at_rarely_until_it_changes_often(monkeypatch):
    monkeypatch.setattr(file_watch, "PAUSE_SHARE", 0.1)
    clock = SettableClock()
    schedule = LookSchedule(clock=clock)
    schedule.follow(["a"], listed=frozenset("a"))
    looks, changes = [], {40, 80, 120, *range(121, 140)}
    for clock.now in range(140):
        if schedule.take_due():
            looks.append(clock.now)
            if any(looks[-2] < change <= clock.now for change in changes if looks[1:]):
                schedule.note_change("a")
    of_second = [look for look in looks if 50 <= look < 80]
    assert len(of_second) <= 8, "every 4 s, as before its change, and not every second"
    assert looks[-5:] == [135, 136, 137, 138, 139]


def test_of_counts_that_follow_each_other_a_reader_may_get_the_last_alone(log, tmp_path):
    """Not across the start of a new process, whose counts start at zero."""
    for event in (*map(count, (1, 2, 3)), WorkerStarted(pid=1), *map(count, (1, 5))):
        log.emit(event)
    reader = EventReader(tmp_path, choose_lines=drop_superseded)
    assert [getattr(event, "done", "started") for event in reader.poll_merged()] == [3, "started", 5]
    log.emit(count(6))
    assert [event.done for event in reader.poll_merged()] == [6]
    assert len(list(EventReader(tmp_path).poll_merged())) == 7


def test_events_of_many_files_come_in_the_order_of_jobs_and_time_with_one_job_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(event_log, "_MAX_MERGED_BYTES", 100 * event_log._MIN_BLOCK_BYTES)
    lines = [(job, worker, time) for job in (2, 10) for worker in range(200) for time in (worker + 1.0, worker + 300.0)]
    for job, worker, time in lines:
        with (tmp_path / f"{job:03d}-env-{worker}.jsonl").open("a") as file:
            file.write(f'{{"time": {time}, "event": "checkpoint", "job": {job}, "step": {worker}}}\n')
    (tmp_path / "foreign.jsonl").write_text('{"time": 5.5, "event": "checkpoint", "job": 2, "step": 1}\n')
    read: list[tuple[str, int]] = []
    read_block = EventReader._read_block

    def record(reader, name, num_bytes):
        read.append((name, num_bytes))
        return read_block(reader, name, num_bytes)

    monkeypatch.setattr(EventReader, "_read_block", record)
    events = EventReader(tmp_path).poll_merged()
    first = next(events)
    assert {name[:4] for name, _ in read} == {"002-", "fore"}
    assert {num for name, num in read if name.startswith("002")} == {event_log._MIN_BLOCK_BYTES}
    places = [(event.job, event.time) for event in (first, *events)]
    assert places == sorted([(2, 5.5), *((job, time) for job, _, time in lines)])
    assert len(read) == 401


def count(num: int) -> EpisodesCounted:
    return EpisodesCounted(done=num)


def test_damaged_lines_are_counted_by_file(log, tmp_path):
    log.emit(CheckpointSaved(step=1))
    with log.path.open("ab") as file:
        file.write(b'{"event": "checkp\n\n[1]\n\x00\x00\x00\n')
    log.emit(CheckpointSaved(step=2))
    reader = EventReader(tmp_path)
    assert [event.step for event in reader.poll() if isinstance(event, CheckpointSaved)] == [1, 2]
    assert reader.describe_damage() == [f"3 lines of {tmp_path.name}/w.jsonl are damaged"]
    with log.path.open("ab") as file:
        file.write(b"x\n")
    assert list(reader.poll()) == []
    assert reader.damaged == {"w.jsonl": 4}


def test_an_event_of_a_newer_version_is_no_damage(log, tmp_path):
    with log.path.open("ab") as file:
        file.write(b'{"time": 1, "event": "teleported"}\n')
    reader = EventReader(tmp_path)
    assert list(reader.poll()) == []
    assert reader.describe_damage() == []


def test_an_event_whose_fields_are_wrong_is_damage(log, tmp_path):
    with log.path.open("ab") as file:
        file.write(b'{"time": 1, "event": "checkpoint", "step": "many"}\n')
    reader = EventReader(tmp_path)
    assert list(reader.poll_merged()) == []
    assert reader.describe_damage() == [f"1 line of {tmp_path.name}/w.jsonl is damaged"]
