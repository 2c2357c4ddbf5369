"""The courier beside the trainer: versions that the trainer overwrites before they are sent."""

from pathlib import Path

from hpcrl.campaign_dir.event_log import EventLog, EventReader
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.weights.couriers.link import CourierConnection
from hpcrl.weights.couriers.protocol import CourierPeer, PeerWatch
from hpcrl.weights.couriers.sender import MAX_SKIPPED, VersionSender
from hpcrl.weights.layout import TensorLayout
from hpcrl.weights.window import file
from hpcrl.weights.window.file import WindowKey
from hpcrl.weights.window.window import Window
from tests.support.listening_transport import ListeningTransport

LAYOUT = TensorLayout.pack([("w", "uint8", (1 << 12,))])


def make_sender(tmp_path: Path) -> tuple[Window, VersionSender]:
    """Make a window, and the courier that sends its versions to one other node."""
    job = CampaignDir(tmp_path / "campaign").job(0)
    key = WindowKey(campaign=tmp_path / "campaign", node="n0", directory=tmp_path, part=False)
    window = Window.create(key, LAYOUT, job=job)
    watch = PeerWatch(peers={2: CourierPeer(rank=2, node="n2", last_received=0.0)}, silence_timeout_s=float("inf"))
    events = EventLog(tmp_path / "courier.jsonl", role="courier")
    connection, status = CourierConnection(ListeningTransport(), watch=watch), tmp_path / "status.json"
    return window, VersionSender(key, connection, job=job, events=events, status_path=status, codec="auto")


def test_a_version_that_its_writer_has_not_released_is_sent_later_and_nothing_is_reported(tmp_path: Path) -> None:
    """The trainer may lose its core between the two: couriers then tried a thousand times a second."""
    window, sender = make_sender(tmp_path)
    window.start_version(1, step=1)[:] = bytes(LAYOUT.nbytes)
    window.commit()
    found = sender._newest_complete()
    assert found is not None
    slot = window._state_of(1).slot
    lease = window._lease(file.SLOT_LOCKS[slot], exclusive=True, wait_s=0.0)
    assert lease is not None
    for _ in range(MAX_SKIPPED):
        assert not sender._send_version(found, chain=(2,))
    window._release(lease)
    window.close()
    assert list(EventReader(tmp_path).poll()) == []


def test_an_overwritten_version_is_left_silently_but_not_for_ever(tmp_path: Path) -> None:
    window, sender = make_sender(tmp_path)
    log = tmp_path / "courier.jsonl"
    window.start_version(1, step=1)[:] = bytes(LAYOUT.nbytes)
    window.commit()
    found = sender._newest_complete()
    assert found is not None
    assert found.version == 1
    for version in (2, 3):  # before it is read
        window.start_version(version, step=version)[:] = bytes(LAYOUT.nbytes)
        window.commit()
    reports = []
    for _ in range(MAX_SKIPPED):
        assert not sender._send_version(found, chain=(2,))
        reports.append([event.detail for event in EventReader(tmp_path).poll()] if log.exists() else [])
    window.close()
    assert reports[:-1] == [[]] * (MAX_SKIPPED - 1)
    assert "5 versions in a row were overwritten before they were sent" in reports[-1][0]
