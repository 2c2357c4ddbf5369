"""The receiving courier: its reports while its window is replaced, and the error of a full memory."""

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import xxhash

from hpcrl.campaign_dir.event_log import EventLog
from hpcrl.campaign_dir.paths import JobDir
from hpcrl.weights.couriers.link import CourierConnection, DoneCheck, MessageTag
from hpcrl.weights.couriers.protocol import CourierPeer, CourierReport, NoRoomError, PeerWatch, VersionAnnouncement
from hpcrl.weights.couriers.receiver import VersionReceiver
from hpcrl.weights.layout import TensorLayout
from hpcrl.weights.window.file import WindowKey
from hpcrl.weights.window.window import Window
from tests.support.disks import largest_file

SMALL = TensorLayout.pack([("w", "uint8", (1 << 12,))])
OTHER = TensorLayout.pack([("v", "float32", (1 << 14,))])


class Nowhere:
    """A transport that only records messages."""

    rank = 1

    def __init__(self) -> None:
        self.messages: list[bytes] = []

    def send_message(self, message: bytes, *, to: int, tag: MessageTag) -> DoneCheck:
        self.messages.append(message)
        return lambda: True

    def poll_messages(self, tag: MessageTag) -> Iterator[tuple[int, bytes]]:
        return iter(())

    def send(self, chunk: memoryview, *, to: int) -> DoneCheck:
        return lambda: True

    def receive(self, chunk: memoryview, *, source: int) -> DoneCheck:
        return lambda: True


@pytest.fixture
def wire() -> Nowhere:
    return Nowhere()


@pytest.fixture
def wakes() -> list[str]:
    return []


@pytest.fixture
def receiver(tmp_path: Path, wire: Nowhere, wakes: list[str]) -> VersionReceiver:
    watch = PeerWatch(peers={0: CourierPeer(rank=0, node="n0", last_received=0.0)}, silence_timeout_s=float("inf"))
    key = WindowKey(campaign=tmp_path / "campaign", node="n1", directory=tmp_path)
    events = EventLog(tmp_path / "courier.jsonl", role="courier")
    return VersionReceiver(
        key,
        CourierConnection(wire, watch=watch),
        job=JobDir(tmp_path / "000"),
        events=events,
        on_received=lambda: wakes.append("engines"),
    )


def announced(version: int, layout: TensorLayout) -> VersionAnnouncement:
    return VersionAnnouncement(
        version=version, step=version, layout=layout, checksums={}, chain=(1,), number=version, nbytes=layout.nbytes
    )


def test_reports_continue_while_the_window_is_replaced(
    receiver: VersionReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    window, _ = receiver._start_version(announced(1, SMALL))
    window.commit()
    create: Callable[..., Window] = Window.create
    reports = []

    def create_with_a_pulse(*arguments: object, **more: object) -> Window:
        reports.append(msgspec.json.decode(receiver._encode_report(), type=CourierReport))
        return create(*arguments, **more)

    monkeypatch.setattr(Window, "create", create_with_a_pulse)
    window, slot = receiver._start_version(announced(2, OTHER))
    assert len(reports) == 1
    assert window.layout == OTHER
    assert len(slot) == OTHER.nbytes


def test_a_node_without_room_for_a_window_is_named(receiver: VersionReceiver) -> None:
    window, _ = receiver._start_version(announced(1, SMALL))
    window.commit()
    with largest_file(1 << 16), pytest.raises(NoRoomError, match=r"node n1: no window of 0\.1 MiB \(two versions\)"):
        receiver._start_version(announced(2, OTHER))


def test_a_damaged_version_is_dropped_and_reported_and_the_next_is_received(
    receiver: VersionReceiver, wire: Nowhere, wakes: list[str]
) -> None:
    receiver._receive_version(announced(1, SMALL))
    zeros = {"w": xxhash.xxh3_128_hexdigest(bytes(SMALL.nbytes))}
    receiver._receive_version(msgspec.structs.replace(announced(2, SMALL), checksums=zeros))
    reports = [msgspec.json.decode(message, type=CourierReport) for message in wire.messages]
    damaged = next(report for report in reports if report.damaged >= 0)
    assert (damaged.has, damaged.damaged) == (-1, 1)
    assert reports[-1].has == 2
    assert wakes == ["engines"]
