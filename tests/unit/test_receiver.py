"""The receiving courier without its ranks: what it reports while its window is replaced, and where it has no room."""

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import xxhash

from hpcrl.campaign_dir.event_log import EventLog
from hpcrl.campaign_dir.paths import JobDir
from hpcrl.weights.couriers.link import Done, Link, Tag
from hpcrl.weights.couriers.protocol import Announcement, NoRoomError, Peer, Report, Watch
from hpcrl.weights.couriers.receiver import Receiver
from hpcrl.weights.layout import Layout
from hpcrl.weights.window.file import Key
from hpcrl.weights.window.window import Window
from tests.disks import largest_file

SMALL = Layout.pack([("w", "uint8", (1 << 12,))])
OTHER = Layout.pack([("v", "float32", (1 << 14,))])


class Nowhere:
    """A wire to nobody."""

    rank = 1

    def __init__(self) -> None:
        self.told: list[bytes] = []

    def tell(self, message: bytes, *, to: int, tag: Tag) -> Done:
        self.told.append(message)
        return lambda: True

    def heard(self, tag: Tag) -> Iterator[tuple[int, bytes]]:
        return iter(())

    def send(self, piece: memoryview, *, to: int) -> Done:
        return lambda: True

    def receive(self, piece: memoryview, *, source: int) -> Done:
        return lambda: True


@pytest.fixture
def wire() -> Nowhere:
    return Nowhere()


@pytest.fixture
def receiver(tmp_path: Path, wire: Nowhere) -> Receiver:
    watch = Watch(peers={0: Peer(rank=0, node="n0", heard=0.0)}, silent_s=float("inf"))
    key = Key(campaign=tmp_path / "campaign", node="n1", directory=tmp_path)
    events = EventLog(tmp_path / "courier.jsonl", role="courier")
    return Receiver(key, Link(wire, watch=watch), job=JobDir(tmp_path / "000"), events=events)


def announced(version: int, layout: Layout) -> Announcement:
    return Announcement(
        version=version, step=version, layout=layout, checksums={}, chain=(1,), number=version, nbytes=layout.nbytes
    )


def test_reports_go_on_while_the_window_is_replaced(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    window, _ = receiver._begin(announced(1, SMALL))
    window.commit()
    create: Callable[..., Window] = Window.create
    told = []

    def create_while_the_pulse_goes_on(*arguments: object, **more: object) -> Window:
        told.append(msgspec.json.decode(receiver._report(), type=Report))
        return create(*arguments, **more)

    monkeypatch.setattr(Window, "create", create_while_the_pulse_goes_on)
    window, slot = receiver._begin(announced(2, OTHER))
    assert len(told) == 1
    assert window.layout == OTHER
    assert len(slot) == OTHER.nbytes


def test_a_node_without_room_for_a_window_says_which_it_is(receiver: Receiver) -> None:
    window, _ = receiver._begin(announced(1, SMALL))
    window.commit()
    with largest_file(1 << 16), pytest.raises(NoRoomError, match=r"node n1: no window of 0\.1 MiB \(two versions\)"):
        receiver._begin(announced(2, OTHER))


def test_what_arrives_damaged_is_dropped_and_told_and_the_next_version_is_taken(
    receiver: Receiver, wire: Nowhere
) -> None:
    receiver._receive(announced(1, SMALL))
    zeros = {"w": xxhash.xxh3_128_hexdigest(bytes(SMALL.nbytes))}
    receiver._receive(msgspec.structs.replace(announced(2, SMALL), checksums=zeros))
    damaged, taken = [report for message in wire.told if (report := msgspec.json.decode(message, type=Report)).nbytes]
    assert (damaged.has, damaged.damaged) == (-1, 1)
    assert taken.has == 2
