"""Windows that the ranks of a trainer fill together: nowhere is a full tensor assembled first.

    ShardStore      one rank's end: every rank stages the boxes that it holds, and rank 0 commits
    exchange_over   what the ranks tell each other by, over a torch.distributed group

    store = ShardStore(window_key(run, node=this_node()), job=job, layout=layout, rank=rank, exchange=exchange)
    store.stage(shards, weight_version)         # on every rank; training goes on when it returns
    store.commit()                              # on rank 0, in any thread: Publisher does it

What any rank finds wrong, all ranks raise, before anything is visible; the version before stays in use.

On one node the window is that of its engines. On several each has one of its own, for its part (`Parts`), which the
first rank there commits; couriers bring the parts together where engines are, and nobody else does.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed

from hpcrl.campaign_dir.paths import JobDir
from hpcrl.errors import WeightsError
from hpcrl.system.files import discard
from hpcrl.weights import part_files
from hpcrl.weights.file_store import FileStore
from hpcrl.weights.layout import Layout, Parts, Placed, Shard, check_cover, check_shard
from hpcrl.weights.store import tensors_in
from hpcrl.weights.versions import Manifest, WeightVersion
from hpcrl.weights.window.file import Key
from hpcrl.weights.window.window import Turn, Window

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
    """From the first rank on a node: where those there write."""
    newest: int | None = None
    """From the same: the version that an earlier trainer has left."""


class ShardStore:
    """One rank's end of the window of its node; the first rank there makes it with the first version."""

    def __init__(
        self,
        key: Key,
        *,
        job: JobDir,
        layout: Layout,
        rank: int,
        exchange: Exchange,
        parts: Parts | None = None,
    ) -> None:
        """`parts`: what lies where if the ranks are on several nodes, and then `key` is that of this node's part."""
        self._key = key
        self._job = job
        self._layout = layout
        self._rank = rank
        self._exchange = exchange
        self._parts = parts
        self._writer = 0 if parts is None else parts.writer(rank)
        self._here = layout if parts is None else parts.layouts[parts.nodes[rank]]
        self._window: Window | None = None
        self._agreed: list[tuple[Shard, ...]] | None = None
        self._before: tuple[int | None, ...] = ()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shards")
        self._behind: list[Future[Any]] = []

    # ---- every rank

    def stage(self, shards: Shards, weight_version: WeightVersion) -> None:
        """Copy this rank's boxes into the slot; all ranks call it, and the tensors may change when it returns.

        WeightsError, on all ranks alike: a tensor is missing, extra, held twice, of a wrong shape or type, or there
        is no window to write to.
        """
        turn, error = self._agree(shards, weight_version), ""
        try:
            window = self._joined()
            with window.part(turn) as slot:
                _fill(slot, self._here, shards)
        except WeightsError as found:
            error = str(found)
        self._say(Word(error=error))
        self._before = ()
        if self._rank != self._writer:
            self._later(lambda: _help(window, turn))
        elif self._rank != 0:
            self._later(window.commit)

    def recall(self) -> None:
        """Learn what an earlier trainer has left on all nodes; all ranks call it, before the first version."""
        newest = None
        if self._rank == self._writer:
            self._window = Window.open(self._key, job=self._job.number)
            manifest = None if self._window is None else self._window.newest()
            newest = None if manifest is None else manifest.version
        words = self._say(Word(newest=newest))
        self._before = tuple(words[writer].newest for writer in self._writers())

    def leave(self, version: int, directory: Path) -> None:
        """If this rank commits for its node: leave its part of what was staged there, behind everything else."""
        if self._rank == self._writer and (window := self._window) is not None:
            self._later(lambda: part_files.leave_window(window, version, directory, rank=self._rank))

    def unlink(self) -> None:
        """Remove the name of a window that this rank made; for the trainer's end."""
        if self._window is not None and self._window.end == "writer":
            self._window.unlink()

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
        """The newest complete version; also what an earlier trainer of this job left, if all nodes have it."""
        if self._window is None:
            self._window = Window.open(self._key, job=self._job.number)
        if self._window is None or len(set(self._before)) > 1:
            return None
        return self._window.newest()

    def made(self) -> int | None:
        """The newest version that ever came into a window, be it on one node alone."""
        newest = self.newest()
        known = [*self._before, None if newest is None else newest.version]
        return max((version for version in known if version is not None), default=None)

    def saver(self, files: FileStore, weight_version: WeightVersion) -> Callable[[], object]:
        """What writes a version to files once it is committed."""
        return lambda: self._save(files, weight_version)

    def gatherer(self, files: FileStore, weight_version: WeightVersion, *, directory: Path) -> Callable[[], object]:
        """The same where the parts of other nodes are left in `directory`."""
        return lambda: self._gather(files, weight_version, directory=directory)

    # ---- inside

    def _agree(self, shards: Shards, weight_version: WeightVersion) -> Turn:
        """Where to write, once all ranks have said what they hold and it is right."""
        error, turn, boxes = "", None, tuple(shard for shard, _ in shards)
        try:
            self._settle()
            _check(shards, self._layout)
            if self._rank == self._writer:
                turn = self._begun(weight_version)
        except WeightsError as found:
            error = str(found)
        words = self._say(Word(error=error, layout=self._layout.digest(), shards=boxes, turn=turn))
        for rank, word in enumerate(words):
            if word.layout != words[0].layout:
                raise WeightsError(f"rank {rank} has another layout than rank 0: do both hold the same model?")
        held = [word.shards for word in words]
        if held != self._agreed:
            self._check_held(held)
            self._agreed = held
        turn = words[self._writer].turn
        assert turn is not None, "it has begun, or has said why not"
        return turn

    def _check_held(self, held: list[tuple[Shard, ...]]) -> None:
        """WeightsError unless all ranks together hold the model, and each node what its window is made for."""
        if self._parts is None:
            check_cover(self._layout, held)
        elif Parts.of(self._layout, nodes=self._parts.nodes, held=held) != self._parts:
            raise WeightsError("the ranks hold other boxes of the weights than when they began: start the trainer anew")

    def _say(self, word: Word) -> list[Word]:
        """What all ranks say; WeightsError, on all of them, if one has found something wrong."""
        words = [msgspec.msgpack.decode(said, type=Word) for said in self._exchange(msgspec.msgpack.encode(word))]
        if wrong := [f"rank {rank}: {word.error}" for rank, word in enumerate(words) if word.error]:
            raise WeightsError("; ".join(wrong))
        return words

    def _begun(self, weight_version: WeightVersion) -> Turn:
        if self._window is None or self._window.end != "writer":
            self._let_go()
            self._window = Window.create(self._key, self._here, job=self._job)
        self._window.begin(weight_version.version, step=weight_version.step)
        return self._window.turn()

    def _joined(self) -> Window:
        """This rank's end of the window that the first one here has made, perhaps anew."""
        if self._rank != self._writer and (self._window is None or not self._window.is_current()):
            self._let_go()
            self._window = Window.join(self._key, job=self._job.number)
        assert self._window is not None
        return self._window

    def _writers(self) -> list[int]:
        return [0] if self._parts is None else list(self._parts.writers().values())

    def _save(self, files: FileStore, weight_version: WeightVersion) -> None:
        assert self._window is not None, "there is a version to read"
        with self._window.reading(weight_version.version) as slot:
            files.publish(tensors_in(slot, self._layout), weight_version)

    def _gather(self, files: FileStore, weight_version: WeightVersion, *, directory: Path) -> None:
        assert self._window is not None, "there is a version to read"
        assert self._parts is not None, "other nodes leave their parts"
        parts = {writer: self._parts.layouts[node] for node, writer in self._parts.writers().items()}
        with self._window.reading(weight_version.version) as slot:
            tensors = part_files.tensors(self._layout, slot, parts, directory, rank=self._rank)
            files.publish_each(self._layout, tensors, weight_version)
        discard(directory)

    def _later(self, work: Callable[[], Any]) -> None:
        """Do it while training goes on; one thing after the other."""
        self._behind.append(self._thread.submit(work))

    def _settle(self) -> None:
        """Wait for what is behind; what went wrong there is raised here."""
        behind, self._behind = self._behind, []
        for future in behind:
            future.result()

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
    """Each box with one strided copy, from whatever device it is on, into the box of the layout that holds it."""
    tensors, boxes = tensors_in(slot, layout), defaultdict[str, list[Placed]](list)
    for box in layout.tensors:
        boxes[box.shard.name].append(box)
    for shard, values in shards:
        for box in boxes[shard.name] if shard.num_values else ():
            if (index := shard.index_in(box.shard)) is not None:
                tensors[box.name][index].copy_(values.detach())


def _help(window: Window, turn: Turn) -> None:
    """Take a share of the checksums; rank 0 may have been quicker, and then there is nothing left to do."""
    with contextlib.suppress(WeightsError), window.part(turn):
        window.sum_up(turn)
