"""The courier of another node of the trainer without its ranks: what it offers and sends, and says where it cannot."""

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from hpcrl.campaign_dir.event_log import EventLog
from hpcrl.campaign_dir.paths import JobDir
from hpcrl.weights.couriers.link import Done, Link, Tag
from hpcrl.weights.couriers.part_sender import Contributor
from hpcrl.weights.couriers.protocol import Announcement, Offer, Part, Peer, Report, Watch
from hpcrl.weights.layout import Layout, Parts, split
from hpcrl.weights.window.file import Key
from hpcrl.weights.window.window import Window

WHOLE = Layout.pack([("w", "uint8", (1 << 12, 3)), ("columns", "uint8", (7, 10))])
ROWS, COLUMNS = split(WHOLE.tensors[0], axis=0, num=2), split(WHOLE.tensors[1], axis=1, num=2)
FIRST, SECOND = Parts.of(
    WHOLE, nodes=("n0", "n1"), held=[[ROWS[0], COLUMNS[0]], [ROWS[1], COLUMNS[1]]]
).layouts.values()


class Listening:
    """A wire to others who only listen."""

    rank = 1

    def __init__(self) -> None:
        self.told: list[tuple[Tag, bytes]] = []
        self.sent: list[bytes] = []

    def tell(self, message: bytes, *, to: int, tag: Tag) -> Done:
        self.told.append((tag, message))
        return lambda: True

    def heard(self, tag: Tag) -> Iterator[tuple[int, bytes]]:
        return iter(())

    def send(self, piece: memoryview, *, to: int) -> Done:
        assert to == 2
        self.sent.append(bytes(piece))
        return lambda: True

    def receive(self, piece: memoryview, *, source: int) -> Done:
        raise AssertionError("nobody sends to it")


@pytest.fixture
def wire() -> Listening:
    return Listening()


@pytest.fixture
def key(tmp_path: Path) -> Key:
    return Key(campaign=tmp_path / "campaign", node="n1", directory=tmp_path, part=True)


@pytest.fixture
def contributor(tmp_path: Path, wire: Listening, key: Key) -> Contributor:
    watch = Watch(peers={0: Peer(rank=0, node="n0", heard=0.0)}, silent_s=float("inf"))
    events = EventLog(tmp_path / "courier.jsonl", role="courier")
    return Contributor(key, Link(wire, watch=watch), job=JobDir(tmp_path / "000"), events=events)


@pytest.fixture
def publish(key: Key, tmp_path: Path) -> Iterator[Callable[[int], bytes]]:
    """The trainer on this node: what lies in its window after it has published."""
    window = Window.create(key, SECOND, job=JobDir(tmp_path / "000"))

    def publish(version: int) -> bytes:
        data = bytes((version + at) % 251 for at in range(SECOND.nbytes))
        window.begin(version, step=version)[:] = data
        window.commit()
        return data

    yield publish
    window.close()


def announced(version: int) -> Announcement:
    parts = tuple(Part(source=rank, layout=part, checksums={}) for rank, part in enumerate((FIRST, SECOND)))
    nbytes = sum(part.layout.nbytes for part in parts)
    return Announcement(
        version=version, step=version, layout=WHOLE, checksums={}, chain=(2,), number=9, nbytes=nbytes, parts=parts
    )


def last_report(wire: Listening) -> Report:
    tag, message = wire.told[-1]
    assert tag is Tag.REPORT
    return msgspec.json.decode(message, type=Report)


def test_every_version_is_offered_once(
    contributor: Contributor, wire: Listening, publish: Callable[[int], bytes]
) -> None:
    assert not contributor._offer()
    for version in (1, 2):
        publish(version)
        assert contributor._offer()
        assert not contributor._offer()
    offers = [msgspec.json.decode(message, type=Offer) for tag, message in wire.told if tag is Tag.OFFER]
    assert [offer.version for offer in offers] == [1, 2]
    assert {offer.layout for offer in offers} == {SECOND}
    assert set(offers[0].checksums) == {"w@2048,0", "columns@0,5"}


def test_its_part_is_sent_to_the_first_receiver(
    contributor: Contributor, wire: Listening, publish: Callable[[int], bytes]
) -> None:
    data = publish(1)
    contributor._contribute(announced(1))
    rows, columns = SECOND.tensors
    assert wire.sent == [data[box.offset : box.offset + box.nbytes] for box in (rows, columns)]
    assert last_report(wire) == Report(nbytes=SECOND.nbytes, ended=9)


def test_where_its_part_is_gone_as_many_bytes_are_sent_and_it_says_so(
    contributor: Contributor, wire: Listening, publish: Callable[[int], bytes]
) -> None:
    for version in (1, 2, 3):
        publish(version)
    contributor._contribute(announced(1))
    assert [len(piece) for piece in wire.sent] == [box.nbytes for box in SECOND.tensors]
    assert last_report(wire) == Report(nbytes=SECOND.nbytes, ended=9, damaged=9)


def test_without_a_window_it_is_the_same(contributor: Contributor, wire: Listening) -> None:
    contributor._contribute(announced(1))
    assert [len(piece) for piece in wire.sent] == [box.nbytes for box in SECOND.tensors]
    assert last_report(wire).damaged == 9


def test_a_part_that_is_overwritten_while_it_is_sent_is_told_too(
    contributor: Contributor, wire: Listening, publish: Callable[[int], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcrl.weights.window.window.LEASE_S", 0.05)
    publish(1)
    send = wire.send

    def send_late(piece: memoryview, *, to: int) -> Done:
        if not wire.sent:
            publish(2)
            publish(3)
        return send(piece, to=to)

    monkeypatch.setattr(wire, "send", send_late)
    contributor._contribute(announced(1))
    assert [len(piece) for piece in wire.sent] == [box.nbytes for box in SECOND.tensors]
    assert last_report(wire).damaged == 9
