"""Waiting for buckets: over MPI, bytes move only in polls."""

import resource
import time

import pytest

from hpcrl.weights.couriers.link import MOVED_S, ByteChunk, CourierConnection, DoneCheck
from hpcrl.weights.couriers.protocol import PeerWatch
from tests.support.listening_transport import ListeningTransport

NUM_POLLS = 2000
NUM_TRIES = 5
"""On a busy machine a try may take MAX_SPIN_S, after which there are naps."""


class SlowTransport(ListeningTransport):
    """Every bucket is received after some polls, each of which takes a while."""

    poll_s = 0.0

    def receive(self, chunk: memoryview, *, source: int) -> DoneCheck:
        polls = iter(range(NUM_POLLS))

        def move() -> bool:
            end = time.monotonic() + self.poll_s
            while time.monotonic() < end:
                pass
            return next(polls, None) is None

        return move if self.poll_s else lambda: next(polls, None) is None


@pytest.mark.parametrize(("poll_s", "has_naps"), [(2 * MOVED_S, False), (0.0, True)])
def test_a_bucket_is_polled_without_naps_while_polls_move_bytes(poll_s: float, has_naps: bool) -> None:
    transport = SlowTransport()
    transport.poll_s = poll_s
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
