"""Waiting for buckets: over MPI, bytes move only in polls."""

import resource
import time
from types import SimpleNamespace

import pytest

from hpcrl.weights.couriers import link
from hpcrl.weights.couriers.link import MAX_SPIN_S, MOVED_S, ByteChunk, CourierConnection, DoneCheck
from hpcrl.weights.couriers.protocol import PeerWatch
from tests.support.clocks import SettableClock
from tests.support.listening_transport import ListeningTransport

NUM_POLLS = 200
NUM_TRIES = 5
"""In a try the thread may wait for something else, such as memory."""


class SlowTransport(ListeningTransport):
    """Every bucket is received after some polls, each of which takes a while by a clock."""

    def __init__(self, clock: SettableClock, *, poll_s: float) -> None:
        super().__init__()
        self.clock, self.poll_s = clock, poll_s

    def receive(self, chunk: memoryview, *, source: int) -> DoneCheck:
        polls = iter(range(NUM_POLLS))

        def move() -> bool:
            self.clock.now += self.poll_s
            return next(polls, None) is None

        return move


@pytest.mark.parametrize(
    ("poll_s", "has_naps"), [(2 * MOVED_S, False), (MOVED_S / 5, True), (MAX_SPIN_S / NUM_POLLS * 2, True)]
)
def test_a_bucket_is_polled_without_naps_while_polls_move_bytes(
    monkeypatch: pytest.MonkeyPatch, poll_s: float, has_naps: bool
) -> None:
    """By a clock of polls: on a busy machine they take MAX_SPIN_S, after which there are naps."""
    clock = SettableClock(0.0)
    monkeypatch.setattr(link, "time", SimpleNamespace(monotonic=clock, sleep=time.sleep))
    transport = SlowTransport(clock, poll_s=poll_s)
    connection = CourierConnection(transport, watch=PeerWatch(peers={}, silence_timeout_s=10))
    moved: list[int] = []

    def count_naps_of_a_bucket() -> int:
        before = count_naps()
        chunk = ByteChunk(memoryview(bytearray(8)), source=0)
        connection.stream([chunk], target=None, on_moved=lambda _: moved.append(1))
        return count_naps() - before

    naps = min(count_naps_of_a_bucket() for _ in range(NUM_TRIES))
    assert moved == [1] * NUM_TRIES
    assert (naps > 0) == has_naps


def count_naps() -> int:
    """Count how often this thread has left its core to wait."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
