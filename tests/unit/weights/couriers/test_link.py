"""Waiting for buckets: over MPI bytes move only while it is polled."""

import resource

import pytest

from hpcrl.weights.couriers.link import ByteChunk, CourierConnection, DoneCheck
from hpcrl.weights.couriers.protocol import PeerWatch
from tests.support.listening_transport import ListeningTransport

NUM_POLLS = 500


class SlowTransport(ListeningTransport):
    """Every bucket is received after some polls, each of which moves a part of it."""

    def receive(self, chunk: memoryview, *, source: int) -> DoneCheck:
        polls = iter(range(NUM_POLLS))
        return lambda: next(polls, None) is None


@pytest.mark.parametrize("is_moved_by_polls", [True, False])
def test_a_bucket_that_polls_move_is_polled_without_naps(is_moved_by_polls: bool) -> None:
    transport = SlowTransport()
    transport.is_moved_by_polls = is_moved_by_polls
    connection = CourierConnection(transport, watch=PeerWatch(peers={}, silence_timeout_s=10))
    moved: list[int] = []
    before = count_naps()

    connection.stream([ByteChunk(memoryview(bytearray(8)), source=0)], target=None, on_moved=lambda _: moved.append(1))

    assert moved == [1]
    assert (count_naps() - before < NUM_POLLS / 2) == is_moved_by_polls


def count_naps() -> int:
    """Count how often this thread has left its core to wait."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
