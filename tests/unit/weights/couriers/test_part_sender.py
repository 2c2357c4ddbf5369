"""The courier of another node of the trainer: its offers, the bytes it sends, and its reports of damage."""

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from hpcrl.campaign_dir.event_log import EventLog
from hpcrl.campaign_dir.paths import JobDir
from hpcrl.testing.shards import split_tensor
from hpcrl.weights.couriers.link import CourierConnection, DoneCheck, MessageTag
from hpcrl.weights.couriers.part_sender import PartSender
from hpcrl.weights.couriers.protocol import (
    CourierPeer,
    CourierReport,
    NodePart,
    PartOffer,
    PeerWatch,
    VersionAnnouncement,
)
from hpcrl.weights.layout import PartAssignment, TensorLayout
from hpcrl.weights.window.file import WindowKey
from hpcrl.weights.window.window import Window
from tests.support.listening_transport import ListeningTransport

WHOLE = TensorLayout.pack([("w", "uint8", (1 << 12, 3)), ("columns", "uint8", (7, 10))])
ROWS, COLUMNS = (
    split_tensor(WHOLE.tensors[0], axis=0, num_shards=2),
    split_tensor(WHOLE.tensors[1], axis=1, num_shards=2),
)
FIRST, SECOND = PartAssignment.from_shards(
    WHOLE, nodes=("n0", "n1"), held_by_rank=[[ROWS[0], COLUMNS[0]], [ROWS[1], COLUMNS[1]]]
).layouts.values()


@pytest.fixture
def wire() -> ListeningTransport:
    return ListeningTransport()


@pytest.fixture
def key(tmp_path: Path) -> WindowKey:
    return WindowKey(campaign=tmp_path / "campaign", node="n1", directory=tmp_path, part=True)


@pytest.fixture
def contributor(tmp_path: Path, wire: ListeningTransport, key: WindowKey) -> PartSender:
    watch = PeerWatch(peers={0: CourierPeer(rank=0, node="n0", last_received=0.0)}, silence_timeout_s=float("inf"))
    events = EventLog(tmp_path / "courier.jsonl", role="courier")
    return PartSender(key, CourierConnection(wire, watch=watch), job=JobDir(tmp_path / "000"), events=events)


@pytest.fixture
def publish(key: WindowKey, tmp_path: Path) -> Iterator[Callable[[int], bytes]]:
    """The trainer on this node; return the content of its window after a version is published."""
    window = Window.create(key, SECOND, job=JobDir(tmp_path / "000"))

    def publish(version: int) -> bytes:
        data = bytes((version + at) % 251 for at in range(SECOND.nbytes))
        window.start_version(version, step=version)[:] = data
        window.commit()
        return data

    yield publish
    window.close()


def announced(version: int) -> VersionAnnouncement:
    parts = tuple(NodePart(source=rank, layout=part, checksums={}) for rank, part in enumerate((FIRST, SECOND)))
    nbytes = sum(part.layout.nbytes for part in parts)
    return VersionAnnouncement(
        version=version, step=version, layout=WHOLE, checksums={}, chain=(2,), number=9, nbytes=nbytes, parts=parts
    )


def last_report(wire: ListeningTransport) -> CourierReport:
    tag, message = wire.messages[-1]
    assert tag is MessageTag.REPORT
    return msgspec.json.decode(message, type=CourierReport)


def test_every_version_is_offered_once(
    contributor: PartSender, wire: ListeningTransport, publish: Callable[[int], bytes]
) -> None:
    assert not contributor._offer_newest()
    for version in (1, 2):
        publish(version)
        assert contributor._offer_newest()
        assert not contributor._offer_newest()
    offers = [msgspec.json.decode(message, type=PartOffer) for tag, message in wire.messages if tag is MessageTag.OFFER]
    assert [offer.version for offer in offers] == [1, 2]
    assert {offer.layout for offer in offers} == {SECOND}
    assert set(offers[0].checksums) == {"w@2048,0", "columns@0,5"}


def test_its_part_is_sent_to_the_first_receiver(
    contributor: PartSender, wire: ListeningTransport, publish: Callable[[int], bytes]
) -> None:
    data = publish(1)
    contributor._send_part(announced(1))
    rows, columns = SECOND.tensors
    assert wire.sent == [
        data[shard_slot.offset : shard_slot.offset + shard_slot.nbytes] for shard_slot in (rows, columns)
    ]
    assert last_report(wire) == CourierReport(nbytes=SECOND.nbytes, ended=9)


def test_a_lost_part_is_replaced_by_the_same_number_of_bytes_and_reported(
    contributor: PartSender, wire: ListeningTransport, publish: Callable[[int], bytes]
) -> None:
    for version in (1, 2, 3):
        publish(version)
    contributor._send_part(announced(1))
    assert [len(piece) for piece in wire.sent] == [shard_slot.nbytes for shard_slot in SECOND.tensors]
    assert last_report(wire) == CourierReport(nbytes=SECOND.nbytes, ended=9, damaged=9)


def test_a_missing_window_is_reported_too(contributor: PartSender, wire: ListeningTransport) -> None:
    contributor._send_part(announced(1))
    assert [len(piece) for piece in wire.sent] == [shard_slot.nbytes for shard_slot in SECOND.tensors]
    assert last_report(wire).damaged == 9


def test_a_part_that_is_overwritten_while_it_is_sent_is_reported(
    contributor: PartSender, wire: ListeningTransport, publish: Callable[[int], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcrl.weights.window.window.LEASE_TIMEOUT_S", 0.05)
    publish(1)
    send = wire.send

    def send_late(piece: memoryview, *, to: int) -> DoneCheck:
        if not wire.sent:
            publish(2)
            publish(3)
        return send(piece, to=to)

    monkeypatch.setattr(wire, "send", send_late)
    contributor._send_part(announced(1))
    assert [len(piece) for piece in wire.sent] == [shard_slot.nbytes for shard_slot in SECOND.tensors]
    assert last_report(wire).damaged == 9
