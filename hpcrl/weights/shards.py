"""A window that the ranks of a trainer on one node fill together: nowhere is a full tensor assembled first.

    ShardStore      one rank's end: every rank stages the boxes that it holds, and rank 0 commits
    exchange_over   what the ranks tell each other by, over a torch.distributed group

    store = ShardStore(window_key(run, node=this_node()), job=job, layout=layout, rank=rank, exchange=exchange)
    store.stage(shards, version=7, step=7)      # on every rank; training goes on when it returns
    store.commit()                              # on rank 0, in any thread: Publisher does it

What any rank finds wrong, all ranks raise, before anything is visible; the version before stays in use.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import msgspec
import torch
import torch.distributed

from hpcrl.errors import WeightsError
from hpcrl.rundir import JobDir
from hpcrl.weights.layout import Layout, Shard, check_cover, check_shard
from hpcrl.weights.store import Tensors, tensors_in
from hpcrl.weights.versions import Manifest
from hpcrl.weights.window import Key, Turn, Window

Shards = Sequence[tuple[Shard, torch.Tensor]]
"""What a rank holds: where each box belongs, and its values."""
Exchange = Callable[[bytes], list[bytes]]
"""Gives every rank what all ranks said, in their order; returns when all have said it, so it is a barrier too."""


class Word(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank tells the others before they write, and after."""

    error: str = ""
    layout: str = ""
    """Its digest."""
    shards: tuple[Shard, ...] = ()
    turn: Turn | None = None
    """From rank 0: where to write."""


class ShardStore:
    """One rank's end of the window of its node; rank 0 makes it with the first version."""

    def __init__(self, key: Key, *, job: JobDir, layout: Layout, rank: int, exchange: Exchange) -> None:
        self._key = key
        self._job = job
        self._layout = layout
        self._rank = rank
        self._exchange = exchange
        self._window: Window | None = None
        self._agreed: list[tuple[Shard, ...]] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shards")
        self._helping: Future[None] | None = None

    # ---- every rank

    def stage(self, shards: Shards, *, version: int, step: int) -> None:
        """Copy this rank's boxes into the slot; all ranks call it, and the tensors may change when it returns.

        WeightsError, on all ranks alike: a tensor is missing, extra, held twice, of a wrong shape or type, or there
        is no window to write to.
        """
        if self._helping is not None:
            self._helping.result()
        turn, error = self._agree(shards, version=version, step=step), ""
        try:
            window = self._joined()
            with window.part(turn) as slot:
                _fill(slot, self._layout, shards)
        except WeightsError as found:
            error = str(found)
        self._say(Word(error=error))
        if self._rank != 0:
            self._helping = self._thread.submit(_help, window, turn)

    def close(self) -> None:
        """Let go of the window; its name stays."""
        self._thread.shutdown()
        if self._window is not None:
            self._window.close()
            self._window = None

    # ---- rank 0

    def commit(self, _: None = None) -> Manifest:
        """Make what was staged visible; the ranks share the checksums. Safe in another thread than `stage`."""
        assert self._window is not None, "stage comes before commit"
        return self._window.commit()

    def newest(self) -> Manifest | None:
        """The newest complete version; also what an earlier trainer of this job left."""
        if self._window is None:
            self._window = Window.open(self._key, job=self._job.number)
        return self._window.newest() if self._window is not None else None

    @contextmanager
    def reading(self, version: int) -> Iterator[Tensors]:
        """All tensors of a version, whole, where they lie."""
        assert self._window is not None, "there is a version to read"
        with self._window.reading(version) as slot:
            yield tensors_in(slot, self._layout)

    def unlink(self) -> None:
        """Remove the window's name; for rank 0 at the trainer's end."""
        if self._window is not None and self._window.end == "writer":
            self._window.unlink()

    # ---- inside

    def _agree(self, shards: Shards, *, version: int, step: int) -> Turn:
        """Where to write, once all ranks have said what they hold and it is right."""
        error, turn, boxes = "", None, tuple(shard for shard, _ in shards)
        try:
            _check(shards, self._layout)
            if self._rank == 0:
                turn = self._begun(version, step=step)
        except WeightsError as found:
            error = str(found)
        words = self._say(Word(error=error, layout=self._layout.digest(), shards=boxes, turn=turn))
        for rank, word in enumerate(words):
            if word.layout != words[0].layout:
                raise WeightsError(f"rank {rank} has another layout than rank 0: do both hold the same model?")
        held = [word.shards for word in words]
        if held != self._agreed:
            check_cover(self._layout, held)
            self._agreed = held
        turn = words[0].turn
        assert turn is not None, "rank 0 has begun, or has said why not"
        return turn

    def _say(self, word: Word) -> list[Word]:
        """What all ranks say; WeightsError, on all of them, if one has found something wrong."""
        words = [msgspec.msgpack.decode(said, type=Word) for said in self._exchange(msgspec.msgpack.encode(word))]
        if wrong := [f"rank {rank}: {word.error}" for rank, word in enumerate(words) if word.error]:
            raise WeightsError("; ".join(wrong))
        return words

    def _begun(self, version: int, *, step: int) -> Turn:
        if self._window is None or self._window.end != "writer":
            self._let_go()
            self._window = Window.create(self._key, self._layout, job=self._job)
        self._window.begin(version, step=step)
        return self._window.turn()

    def _joined(self) -> Window:
        """This rank's end of the window that rank 0 has made, perhaps anew."""
        if self._rank != 0 and (self._window is None or not self._window.is_current()):
            self._let_go()
            self._window = Window.join(self._key, job=self._job.number)
        assert self._window is not None
        return self._window

    def _let_go(self) -> None:
        if self._window is not None:
            self._window.close()
            self._window = None


def exchange_over(group: torch.distributed.ProcessGroup | None = None) -> Exchange:
    """Over a group of processes on CPUs (gloo): sizes first, then the bytes, padded to the largest."""

    def exchange(said: bytes) -> list[bytes]:
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(torch.distributed.get_world_size(group))]
        torch.distributed.all_gather(sizes, torch.tensor([len(said)]), group=group)
        largest = max(int(size) for size in sizes)
        heard = [torch.zeros(largest, dtype=torch.uint8) for _ in sizes]
        mine = torch.frombuffer(bytearray(said.ljust(largest, b"\0")), dtype=torch.uint8)
        torch.distributed.all_gather(heard, mine, group=group)
        return [bytes(text[: int(size)].numpy()) for text, size in zip(heard, sizes, strict=True)]

    return exchange


def _check(shards: Shards, layout: Layout) -> None:
    tensors = layout.by_name()
    for shard, values in shards:
        check_shard(shard, tensors, dtype=str(values.dtype).removeprefix("torch."), shape=tuple(values.shape))


def _fill(slot: memoryview, layout: Layout, shards: Shards) -> None:
    """Each box with one strided copy, from whatever device it is on."""
    tensors = tensors_in(slot, layout)
    for shard, values in shards:
        tensors[shard.name][shard.index].copy_(values.detach())


def _help(window: Window, turn: Turn) -> None:
    """Take a share of the checksums; rank 0 may have been quicker, and then there is nothing left to do."""
    with contextlib.suppress(WeightsError), window.part(turn):
        window.sum_up(turn)
