"""The trainer's publisher: the window first, files in the background, files alone when the window fails."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from hpcrl.campaign_dir.event_log import EventLog
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.errors import WeightsError
from hpcrl.testing.event_lines import read_events
from hpcrl.weights.layout import TensorLayout
from hpcrl.weights.stores.file_store import FileStore
from hpcrl.weights.stores.publisher import WeightPublisher
from hpcrl.weights.stores.window_store import WindowStore
from hpcrl.weights.versions import (
    Transport,
    WeightVersion,
    find_newest_version,
    list_versions,
    read_transport,
    tensors_file,
    write_transport,
)
from hpcrl.weights.window.file import WindowKey
from tests.support.disks import largest_file

WINDOW = Transport(name="window", reason="one node")


def key(campaign: CampaignDir) -> WindowKey:
    return WindowKey(campaign=campaign.root, node="n", directory=campaign.root.parent)


def window_of(campaign: CampaignDir) -> WindowStore:
    return WindowStore(key(campaign), job=campaign.job(0))


def publisher_of(campaign: CampaignDir) -> WeightPublisher:
    events = EventLog(campaign.events / "train.jsonl", role="train")
    return WeightPublisher(FileStore(campaign.weights), window_of(campaign), events=events, keep_versions=2)


def events_of(campaign: CampaignDir, name: str) -> list[dict[str, Any]]:
    return [event for event in read_events(campaign.events) if event["event"] == name]


def weights(value: float, *, num: int = 10) -> dict[str, torch.Tensor]:
    return {"a": torch.full((num,), float(value))}


def test_a_version_is_in_the_window_and_announced_while_the_tensors_change(campaign: CampaignDir) -> None:
    publisher = publisher_of(campaign)
    publisher.set_transport(WINDOW)
    live = weights(1.0)
    publisher.publish(live, WeightVersion(version=1, step=1))
    live["a"].zero_()
    publisher.publish(live, WeightVersion(version=2, step=2))  # waits for the background work
    reader = window_of(campaign)
    assert float(reader.load(1)["a"][0]) == 1.0
    publisher.close()
    assert find_newest_version(campaign.weights) == 2
    assert list_versions(campaign.weights) == []
    assert [event["version"] for event in events_of(campaign, "published")] == [1, 2]


def test_persisting_writes_the_newest_version_as_it_was_published(campaign: CampaignDir) -> None:
    publisher = publisher_of(campaign)
    publisher.set_transport(WINDOW)
    live = weights(1.0)
    publisher.publish(live, WeightVersion(version=1, step=1))
    live["a"].zero_()
    publisher.persist()
    publisher.persist()
    publisher.close()
    assert list_versions(campaign.weights) == [1]
    assert float(FileStore(campaign.weights).load(1)["a"][0]) == 1.0


def test_without_a_transport_every_version_is_in_files_too(campaign: CampaignDir) -> None:
    publisher = publisher_of(campaign)
    for version in (1, 2, 3):
        publisher.publish(weights(version), WeightVersion(version=version, step=version))
    publisher.close()
    assert list_versions(campaign.weights) == [2, 3]


def test_at_the_end_the_window_is_gone(campaign: CampaignDir) -> None:
    publisher = publisher_of(campaign)
    publisher.publish(weights(1.0), WeightVersion(version=1, step=1))
    publisher.close()
    assert not key(campaign).path.exists()


def test_an_engine_that_asks_for_files_gets_the_newest_version_without_another_step(
    campaign: CampaignDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcrl.weights.stores.publisher.READERS_POLL_INTERVAL_S", 0.0)
    publisher = publisher_of(campaign)
    publisher.set_transport(WINDOW)
    publisher.publish(weights(1.0), WeightVersion(version=1, step=1))
    publisher.poll()
    assert list_versions(campaign.weights) == []
    write_transport(campaign.weights, Transport(name="files", reason="decode-0 cannot read the window"))
    publisher.poll()
    publisher.close()
    assert list_versions(campaign.weights) == [1]


def test_a_window_that_cannot_be_created_switches_to_files_with_an_event(campaign: CampaignDir) -> None:
    publisher = publisher_of(campaign)
    publisher.set_transport(WINDOW)
    with largest_file(1 << 20):
        publisher.publish(weights(1.0, num=200_000), WeightVersion(version=1, step=1))
    publisher.publish(weights(2.0, num=200_000), WeightVersion(version=2, step=2))
    publisher.close()
    assert list_versions(campaign.weights) == [1, 2]
    assert read_transport(campaign.weights) == Transport(
        name="files", reason=events_of(campaign, "transport")[-1]["reason"]
    )
    assert "no window of" in events_of(campaign, "transport")[-1]["reason"]
    assert [event["transport"] for event in events_of(campaign, "transport")] == ["window", "files"]


def test_a_version_that_cannot_be_written_to_files_is_an_error_at_the_next_publish(campaign: CampaignDir) -> None:
    publisher = publisher_of(campaign)
    publisher.publish(weights(1.0), WeightVersion(version=1, step=1))
    publisher.persist()
    publisher.publish(weights(2.0), WeightVersion(version=2, step=2))
    campaign.weights.rename(campaign.root / "elsewhere")
    campaign.weights.write_text("in the way")
    publisher.persist()
    with pytest.raises((WeightsError, OSError)):
        publisher.publish(weights(3.0), WeightVersion(version=3, step=3))


def test_a_restarted_trainer_continues_above_every_version_ever_made(campaign: CampaignDir) -> None:
    first = publisher_of(campaign)
    first.set_transport(WINDOW)
    first.publish(weights(0.0), WeightVersion(version=0, step=0))
    first.persist()
    for version in range(1, 5):
        first.publish(weights(version), WeightVersion(version=version, step=version))
    first._background.wait()
    key(campaign).path.unlink()  # the node is gone, and the window with it
    again = publisher_of(campaign)
    assert again.newest_version() == 4
    assert again.newest_readable() == 0


@pytest.mark.parametrize("room", [None, 1 << 20])
def test_rounded_versions_have_the_same_bits_in_the_window_and_in_files(
    campaign: CampaignDir, room: int | None
) -> None:
    live = {"a": torch.randn(400_000), "exact": torch.randn(7)}
    layout = TensorLayout.pack([("a", "bfloat16", (400_000,)), ("exact", "float32", (7,))])
    window = WindowStore(key(campaign), job=campaign.job(0), layout=layout)
    events = EventLog(campaign.events / "train.jsonl", role="train")
    publisher = WeightPublisher(FileStore(campaign.weights), window, events=events, keep_versions=2, layout=layout)
    publisher.set_transport(WINDOW)
    with nullcontext() if room is None else largest_file(room):
        publisher.publish(live, WeightVersion(version=1, step=1))
    publisher.persist()
    publisher._background.wait()
    if room is None:
        assert key(campaign).path.stat().st_size < 2 * layout.nbytes + (64 << 10)
        in_window = window_of(campaign).load(1)
        assert torch.equal(in_window["a"], live["a"].bfloat16())
        assert torch.equal(in_window["exact"], live["exact"])
    publisher.close()
    in_files = FileStore(campaign.weights).load(1)
    assert torch.equal(in_files["a"], live["a"].bfloat16())
    assert torch.equal(in_files["exact"], live["exact"])
    assert tensors_file(campaign.weights, 1).stat().st_size < live["a"].nbytes // 2 + 1024
    assert [event["transport"] for event in events_of(campaign, "transport")] == ["window"] + ["files"] * (
        room is not None
    )


@pytest.mark.parametrize("change", [lambda live: live.pop("a"), lambda live: live.update(b=torch.ones(1))])
def test_tensors_that_are_not_those_of_the_layout_are_never_published(campaign: CampaignDir, change: Any) -> None:
    live = weights(1.0)
    layout = TensorLayout.from_tensors(live)
    change(live)
    window = WindowStore(key(campaign), job=campaign.job(0), layout=layout)
    with pytest.raises(WeightsError, match="is in the trainer or in the layout of its versions, not in both"):
        window.stage(live, WeightVersion(version=1, step=1))
    with pytest.raises(WeightsError, match=r"tensor 'a': a shard of float32 \[10\] at \[0\] is expected, but float16"):
        window.stage({"a": torch.ones(10).half()}, WeightVersion(version=1, step=1))
    assert not key(campaign).path.exists()
