"""Stuck ranks, and the split of a version into buckets, without MPI."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.weights.couriers.protocol import (
    BUCKET_NBYTES,
    CourierPeer,
    NodePart,
    PeerWatch,
    RankStuckError,
    VersionAnnouncement,
    compute_time_limit_s,
    count_buckets,
    split_into_buckets,
)
from hpcrl.weights.layout import TensorLayout

LAYOUT = TensorLayout.pack([("w", "uint8", (3 * BUCKET_NBYTES,))])
ANNOUNCED = VersionAnnouncement(
    version=7, step=7, layout=LAYOUT, checksums={}, chain=(1, 2), number=1, nbytes=LAYOUT.nbytes
)


def watch(*, silent_s: float = 10.0) -> PeerWatch:
    return PeerWatch(
        peers={rank: CourierPeer(rank=rank, node=f"n{rank}", last_received=100.0) for rank in (1, 2, 3)},
        silence_timeout_s=silent_s,
    )


@given(st.integers(min_value=0, max_value=5 * BUCKET_NBYTES + 1))
def test_buckets_are_all_bytes_in_order_and_none_is_too_large(nbytes: int) -> None:
    cut = list(split_into_buckets(nbytes))
    assert len(cut) == count_buckets(nbytes)
    assert [piece.start for piece in cut] == [0, *(piece.stop for piece in cut)][: len(cut)]
    assert sum(piece.stop - piece.start for piece in cut) == nbytes
    assert all(0 < piece.stop - piece.start <= BUCKET_NBYTES for piece in cut)


def test_peers_that_send_messages_are_left_alone() -> None:
    seen = watch()
    seen.start_transfer(ANNOUNCED, deadline=200.0)
    seen.check(now=109.0)


def test_the_longest_silent_peer_is_named_with_its_progress() -> None:
    seen = watch()
    seen.start_transfer(ANNOUNCED, deadline=200.0)
    seen.peers[2].last_received = 95.0
    seen.peers[2].nbytes = BUCKET_NBYTES + 5
    with pytest.raises(
        RankStuckError, match=r"rank 2 on n2 has sent nothing for 11\.0 s; version 7: .* bucket 1 of 3"
    ) as caught:
        seen.check(now=106.0)
    assert (caught.value.rank, caught.value.node, caught.value.bucket) == (2, "n2", 1)
    assert caught.value.nbytes == BUCKET_NBYTES + 5


def test_at_the_deadline_the_rank_of_the_chain_with_the_least_progress_is_named() -> None:
    seen = watch()
    seen.start_transfer(ANNOUNCED, deadline=105.0)
    seen.peers[1].nbytes = 2 * BUCKET_NBYTES
    seen.peers[2].nbytes = BUCKET_NBYTES
    with pytest.raises(RankStuckError, match="rank 2 on n2 did not finish within"):
        seen.check(now=106.0)


HALF = TensorLayout.pack([("w", "uint8", (2 * BUCKET_NBYTES,))])
IN_PARTS = VersionAnnouncement(
    version=7,
    step=7,
    layout=LAYOUT,
    checksums={},
    chain=(1, 2),
    number=1,
    nbytes=2 * HALF.nbytes,
    parts=tuple(NodePart(source=source, layout=HALF, checksums={}) for source in (0, 3)),
)


@pytest.mark.parametrize(
    ("arrived", "gone", "named"),
    [
        ((2, 2), 0, "n3"),  # they wait for the first bytes of its part
        ((3, 3), 1, "n3"),
        ((2, 1), 0, "n2"),  # a receiver that is still in the part before is behind it
        ((4, 3), 2, "n2"),  # the contributor has sent everything
    ],
)
def test_at_the_deadline_a_contributor_is_named_if_it_is_what_receivers_wait_for(
    arrived: tuple[int, int], gone: int, named: str
) -> None:
    seen = watch()
    seen.start_transfer(IN_PARTS, deadline=105.0)
    for rank, num in ((1, arrived[0]), (2, arrived[1]), (3, gone)):
        seen.peers[rank].nbytes = num * BUCKET_NBYTES
    with pytest.raises(RankStuckError, match=f"on {named} did not finish within"):
        seen.check(now=106.0)


def test_without_a_transfer_nothing_has_a_deadline() -> None:
    seen = watch()
    seen.start_transfer(ANNOUNCED, deadline=105.0)
    seen.end_transfer()
    seen.check(now=109.0)
    with pytest.raises(RankStuckError, match="no transfer was under way"):
        seen.check(now=111.0)


def test_larger_versions_have_longer_deadlines() -> None:
    assert compute_time_limit_s(0) < compute_time_limit_s(1 << 30) < compute_time_limit_s(1 << 40)
