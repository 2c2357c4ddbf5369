"""The trainer's way out: window first, files behind, files alone when the window fails."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcrl.campaign_dir.event_log import EventLog, read_events
from hpcrl.campaign_dir.paths import RunDir
from hpcrl.errors import WeightsError
from hpcrl.weights.file_store import FileStore
from hpcrl.weights.publisher import Publisher
from hpcrl.weights.versions import Rung, WeightVersion, listed, newest_version, read_rung, set_rung
from hpcrl.weights.window.file import Key, unlink_recorded
from hpcrl.weights.window_store import WindowStore
from tests.disks import largest_file

WINDOW = Rung(rung="window", reason="one node")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDir]:
    run = RunDir(tmp_path / "campaign")
    run.events.mkdir(parents=True)
    run.weights.mkdir()
    yield run
    unlink_recorded(run.job(0))


def key(run: RunDir) -> Key:
    return Key(campaign=run.root, node="n", directory=run.root.parent)


def window_of(run: RunDir) -> WindowStore:
    return WindowStore(key(run), job=run.job(0))


def publisher_of(run: RunDir) -> Publisher:
    events = EventLog(run.events / "train.jsonl", role="train")
    return Publisher(FileStore(run.weights), window_of(run), events=events, keep_versions=2)


def events_of(run: RunDir, name: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run.events) if event["event"] == name]


def weights(value: float, *, num: int = 10) -> dict[str, torch.Tensor]:
    return {"a": torch.full((num,), float(value))}


def test_a_version_is_in_the_window_and_announced_while_the_tensors_go_on_changing(run: RunDir) -> None:
    publisher = publisher_of(run)
    publisher.take_rung(WINDOW)
    live = weights(1.0)
    publisher.publish(live, WeightVersion(version=1, step=1))
    live["a"].zero_()
    publisher.publish(live, WeightVersion(version=2, step=2))  # waits for what is behind
    reader = window_of(run)
    assert float(reader.load(1)["a"][0]) == 1.0
    publisher.close()
    assert newest_version(run.weights) == 2
    assert listed(run.weights) == []
    assert [event["version"] for event in events_of(run, "published")] == [1, 2]


def test_persisting_writes_the_newest_version_as_it_was_published(run: RunDir) -> None:
    publisher = publisher_of(run)
    publisher.take_rung(WINDOW)
    live = weights(1.0)
    publisher.publish(live, WeightVersion(version=1, step=1))
    live["a"].zero_()
    publisher.persist()
    publisher.persist()
    publisher.close()
    assert listed(run.weights) == [1]
    assert float(FileStore(run.weights).load(1)["a"][0]) == 1.0


def test_without_a_rung_every_version_is_in_files_too(run: RunDir) -> None:
    publisher = publisher_of(run)
    for version in (1, 2, 3):
        publisher.publish(weights(version), WeightVersion(version=version, step=version))
    publisher.close()
    assert listed(run.weights) == [2, 3]


def test_at_the_end_the_window_is_gone(run: RunDir) -> None:
    publisher = publisher_of(run)
    publisher.publish(weights(1.0), WeightVersion(version=1, step=1))
    publisher.close()
    assert not key(run).path.exists()


def test_an_engine_that_asks_for_files_gets_the_newest_version_without_another_step(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcrl.weights.publisher.TEND_EVERY_S", 0.0)
    publisher = publisher_of(run)
    publisher.take_rung(WINDOW)
    publisher.publish(weights(1.0), WeightVersion(version=1, step=1))
    publisher.tend()
    assert listed(run.weights) == []
    set_rung(run.weights, Rung(rung="files", reason="decode-0 does not see the window"))
    publisher.tend()
    publisher.close()
    assert listed(run.weights) == [1]


def test_when_the_window_cannot_be_made_versions_go_by_files_and_everybody_is_told(run: RunDir) -> None:
    publisher = publisher_of(run)
    publisher.take_rung(WINDOW)
    with largest_file(1 << 20):
        publisher.publish(weights(1.0, num=200_000), WeightVersion(version=1, step=1))
    publisher.publish(weights(2.0, num=200_000), WeightVersion(version=2, step=2))
    publisher.close()
    assert listed(run.weights) == [1, 2]
    assert read_rung(run.weights) == Rung(rung="files", reason=events_of(run, "rung")[-1]["reason"])
    assert "no window of" in events_of(run, "rung")[-1]["reason"]
    assert [event["rung"] for event in events_of(run, "rung")] == ["window", "files"]


def test_a_version_that_cannot_be_written_to_files_is_an_error_at_the_next_publish(run: RunDir) -> None:
    publisher = publisher_of(run)
    publisher.publish(weights(1.0), WeightVersion(version=1, step=1))
    publisher.persist()
    publisher.publish(weights(2.0), WeightVersion(version=2, step=2))
    run.weights.rename(run.root / "elsewhere")
    run.weights.write_text("in the way")
    publisher.persist()
    with pytest.raises((WeightsError, OSError)):
        publisher.publish(weights(3.0), WeightVersion(version=3, step=3))


def test_a_trainer_that_begins_anew_goes_on_above_every_version_ever_made(run: RunDir) -> None:
    first = publisher_of(run)
    first.take_rung(WINDOW)
    first.publish(weights(0.0), WeightVersion(version=0, step=0))
    first.persist()
    for version in range(1, 5):
        first.publish(weights(version), WeightVersion(version=version, step=version))
    first._wait()
    key(run).path.unlink()  # the node is gone, and the window with it
    again = publisher_of(run)
    assert again.newest_version() == 4
    assert again.newest_readable() == 0
