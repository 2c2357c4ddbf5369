"""Parts of a model on several nodes of a trainer become the whole, bit for bit, however its ranks hold it."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.errors import WeightsError
from hpcrl.testing.shards import split_tensor
from hpcrl.weights.couriers import receiver as intake_module
from hpcrl.weights.couriers import spans as messages_module
from hpcrl.weights.couriers.protocol import NodePart
from hpcrl.weights.couriers.receiver import IncomingVersion
from hpcrl.weights.couriers.spans import split_into_spans
from hpcrl.weights.layout import PartAssignment, TensorLayout, TensorShard, join_layouts, make_whole_shard, view_values
from hpcrl.weights.window.file import compute_checksum

Held = list[list[TensorShard]]
KINDS = ("int8", "bfloat16", "float32", "int64")


@st.composite
def trainers(draw: st.DrawFn) -> tuple[TensorLayout, list[str], Held]:
    """Draw a model whose tensors are split repeatedly along any axis, and ranks on up to three nodes with shards."""
    shapes = draw(st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), min_size=1, max_size=4))
    layout = TensorLayout.pack((f"t{i}", draw(st.sampled_from(KINDS)), shape) for i, shape in enumerate(shapes))
    nodes = sorted(draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=5)))
    held: Held = [[] for _ in nodes]
    for tensor in layout.tensors:
        pieces = [make_whole_shard(tensor)]
        for _ in range(draw(st.integers(0, 4)) if tensor.shape else 0):
            pieces += _halves(pieces.pop(draw(st.integers(0, len(pieces) - 1))), draw)
        for piece in pieces:
            if piece.num_values:
                held[draw(st.integers(0, len(nodes) - 1))].append(piece)
    return layout, nodes, held


def _halves(piece: TensorShard, draw: st.DrawFn) -> Iterator[TensorShard]:
    axis = draw(st.integers(0, len(piece.shape) - 1))
    edge = draw(st.integers(0, piece.shape[axis]))
    for low, size in ((0, edge), (edge, piece.shape[axis] - edge)):
        start = tuple(at + low * (i == axis) for i, at in enumerate(piece.start))
        yield TensorShard(name=piece.name, start=start, shape=(*piece.shape[:axis], size, *piece.shape[axis + 1 :]))


def model(layout: TensorLayout, *, seed: int = 0) -> bytearray:
    """Return a slot that holds all of it; the bytes between tensors are zero."""
    slot = bytearray(layout.nbytes)
    dice = np.random.default_rng(seed)
    for tensor in layout.tensors:
        slot[tensor.offset : tensor.offset + tensor.nbytes] = dice.bytes(tensor.nbytes)
    return slot


def slot_of(part: TensorLayout, layout: TensorLayout, data: bytearray) -> bytearray:
    """Return the content of a node's window."""
    slot, tensors = bytearray(part.nbytes), layout.tensors_by_name()
    for shard_slot in part.tensors:
        view_values(memoryview(slot), shard_slot)[...] = view_values(memoryview(data), tensors[shard_slot.shard.name])[
            shard_slot.shard.index
        ]
    return slot


def sums_of(slot: bytearray, layout: TensorLayout) -> dict[str, str]:
    return {tensor.name: compute_checksum(memoryview(slot), tensor).hex() for tensor in layout.tensors}


def receive_parts(
    layout: TensorLayout,
    parts: list[NodePart],
    slots: list[bytearray],
    *,
    damage: Callable[[bytearray], Any] | None = None,
) -> tuple[bytearray, dict[str, str], list[bytes]]:
    """Receive all parts; return the slot, its expected checksums, and the actual ones."""
    target = bytearray(layout.nbytes)
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        intake = IncomingVersion(memoryview(target), layout, parts, lanes=[one, other])
        sent = [
            (part.source, bytearray(slot[message.start : message.stop]))
            for part, slot in zip(parts, slots, strict=True)
            for message in split_into_spans(part.layout, layout)
        ]
        if damage is not None:
            damage(sent[-1][1])
        for piece, (source, data) in zip(intake.chunks(source=None), sent, strict=True):
            assert piece.source == source
            piece.data[:] = data
            intake.add_chunk(piece.data)
        for future in intake.list_pending():
            future.result()
        wanted, sums = intake.verify_checksums()
    return target, wanted, sums


def parts_of(layout: TensorLayout, nodes: list[str], held: Held) -> tuple[list[NodePart], list[bytearray]]:
    made = PartAssignment.from_shards(layout, nodes=nodes, held_by_rank=held)
    data = model(layout)
    slots = [slot_of(part, layout, data) for part in made.layouts.values()]
    parts = [
        NodePart(source=number, layout=part, checksums=sums_of(slot, part))
        for number, (part, slot) in enumerate(zip(made.layouts.values(), slots, strict=True))
    ]
    return parts, slots


@given(trainers(), st.integers(0, 2))
def test_all_parts_together_are_the_whole(trainer: tuple[TensorLayout, list[str], Held], pieces: int) -> None:
    layout, nodes, held = trainer
    parts, slots = parts_of(layout, nodes, held)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(messages_module, "BUCKET_NBYTES", (16, 64, 1 << 20)[pieces])
        target, wanted, sums = receive_parts(layout, parts, slots)
    for tensor in layout.tensors:
        got, sent = (view_values(memoryview(slot), tensor) for slot in (target, model(layout)))
        assert (got == sent).all()
    assert wanted == sums_of(model(layout), layout)
    assert [one.hex() for one in sums] == [wanted[tensor.name] for tensor in layout.tensors]


@given(trainers())
def test_the_whole_layout_follows_from_the_parts(trainer: tuple[TensorLayout, list[str], Held]) -> None:
    layout, nodes, held = trainer
    made = PartAssignment.from_shards(layout, nodes=nodes, held_by_rank=held)
    again = join_layouts([TensorLayout.from_json(part.to_json()) for part in made.layouts.values()])
    assert {(t.name, t.dtype, t.shape) for t in again.tensors} == {(t.name, t.dtype, t.shape) for t in layout.tensors}
    if len(made.layouts) == 1:
        assert list(made.layouts.values()) == [layout] == [again]


@given(trainers())
def test_the_first_rank_on_each_node_writes_its_window(trainer: tuple[TensorLayout, list[str], Held]) -> None:
    layout, nodes, held = trainer
    writers = PartAssignment.from_shards(layout, nodes=nodes, held_by_rank=held).writers()
    assert writers == {node: nodes.index(node) for node in set(nodes)}


LAYOUT = TensorLayout.pack([("q", "bfloat16", (64, 32)), ("o", "bfloat16", (32, 64)), ("norm", "float32", (32,))])
QUERY, OUT, NORM = LAYOUT.tensors
NODES = ["a", "a", "b", "b"]


def tensor_parallel() -> Held:
    """Split it over four ranks, two per node."""
    held = [
        [q, o]
        for q, o in zip(split_tensor(QUERY, axis=0, num_shards=4), split_tensor(OUT, axis=1, num_shards=4), strict=True)
    ]
    held[0].append(make_whole_shard(NORM))
    return held


def test_shards_of_a_node_that_fill_a_larger_one_are_one() -> None:
    first, second = PartAssignment.from_shards(LAYOUT, nodes=NODES, held_by_rank=tensor_parallel()).layouts.values()
    assert [(shard_slot.name, shard_slot.shape) for shard_slot in first.tensors] == [
        ("q@0,0", (32, 32)),
        ("o@0,0", (32, 32)),
        ("norm", (32,)),
    ]
    assert [(shard_slot.name, shard_slot.shape) for shard_slot in second.tensors] == [
        ("q@32,0", (32, 32)),
        ("o@0,32", (32, 32)),
    ]


def test_rows_are_sent_as_one_run_and_columns_are_scattered() -> None:
    first = PartAssignment.from_shards(LAYOUT, nodes=NODES, held_by_rank=tensor_parallel()).layouts["a"]
    assert [message.target_start for message in split_into_spans(first, LAYOUT)] == [QUERY.offset, None, NORM.offset]


def test_adjacent_whole_tensors_are_sent_as_one_run() -> None:
    held = [[make_whole_shard(QUERY), make_whole_shard(OUT)], [], [make_whole_shard(NORM)], []]
    first, second = PartAssignment.from_shards(LAYOUT, nodes=NODES, held_by_rank=held).layouts.values()
    [message] = split_into_spans(first, LAYOUT)
    assert (message.start, message.stop, message.target_start) == (0, NORM.offset, 0)
    assert [message.target_start for message in split_into_spans(second, LAYOUT)] == [NORM.offset]


def test_a_node_that_holds_nothing_has_a_part_without_tensors() -> None:
    held = [[make_whole_shard(tensor) for tensor in LAYOUT.tensors], [], [], []]
    first, second = PartAssignment.from_shards(LAYOUT, nodes=NODES, held_by_rank=held).layouts.values()
    assert (first, second.tensors) == (LAYOUT, ())


def flip(data: bytearray) -> None:
    data[3] ^= 1


def test_a_shard_that_changes_on_the_way_is_refused_by_its_name() -> None:
    parts, slots = parts_of(LAYOUT, NODES, tensor_parallel())
    with pytest.raises(WeightsError, match=r"shard 'o@0,32' of rank 1 arrived with checksum"):
        receive_parts(LAYOUT, parts, slots, damage=flip)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda parts: parts.pop(), r"'q': 1024 of its 2048 values are held by no rank"),
        (lambda parts: parts.append(parts[1]), "rank 1 and rank 2 both hold"),
        (lambda parts: parts.append(TensorLayout.pack([("q", "float32", (64, 32))])), "'q' is float32"),
    ],
)
def test_parts_that_do_not_make_a_whole_are_refused(change: Callable[[Any], object], complaint: str) -> None:
    parts = list(PartAssignment.from_shards(LAYOUT, nodes=NODES, held_by_rank=tensor_parallel()).layouts.values())
    change(parts)
    with pytest.raises(WeightsError, match=complaint):
        join_layouts(parts)


def test_the_layout_of_whole_tensors_is_described_as_ever() -> None:
    described = TensorLayout.pack([("a", "float32", (2,))]).to_json()
    assert described == b'{"tensors":[{"name":"a","dtype":"float32","shape":[2],"offset":0,"nbytes":8}],"nbytes":64}'


def test_chunks_that_wait_to_be_scattered_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages_module, "BUCKET_NBYTES", 64)
    parts, _ = parts_of(LAYOUT, NODES, tensor_parallel())
    may_continue = Event()
    with ThreadPoolExecutor(1) as lane:
        lane.submit(may_continue.wait)
        intake = IncomingVersion(memoryview(bytearray(LAYOUT.nbytes)), LAYOUT, parts, lanes=[lane])
        num = 0
        for piece in intake.chunks(source=None):
            intake.add_chunk(piece.data)
            num += 1
            if not intake.has_room():
                break
        assert QUERY.nbytes // 2 // 64 < num <= QUERY.nbytes // 2 // 64 + intake_module.MAX_PRIVATE_PER_LANE + 1
        may_continue.set()
        for future in intake.list_pending():
            future.result()
        assert intake.has_room()
