"""Windows that the ranks of a trainer fill together: nowhere is a full tensor assembled first.

    ShardStore       one rank's end: every rank stages the boxes that it holds, and rank 0 commits
    make_all_gather  what the ranks tell each other by, over a torch.distributed group

    store = ShardStore(window_key(run, node=this_node()), job=job, layout=layout, rank=rank, exchange=exchange)
    store.stage(shards, weight_version)         # on every rank; training goes on when it returns
    store.commit()                              # on rank 0, in any thread: Publisher does it

What any rank finds wrong, all ranks raise, before anything is visible; the version before stays in use.

On one node the window is that of its engines. On several each has one of its own, for its part (`PartAssignment`), which the
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
from hpcrl.system.files import remove_path
from hpcrl.weights import part_files
from hpcrl.weights.file_store import FileStore
from hpcrl.weights.layout import PartAssignment, TensorLayout, TensorShard, TensorSlot, check_cover, check_shard
from hpcrl.weights.store import view_tensors
from hpcrl.weights.versions import VersionManifest, WeightVersion
from hpcrl.weights.window.file import WindowKey
from hpcrl.weights.window.window import Window, WriteTicket

LocalShards = Sequence[tuple[TensorShard, torch.Tensor]]
"""What a rank holds: where each box belongs, and its values."""
AllGather = Callable[[bytes], list[bytes]]
"""Gives every rank what all ranks said, in their order; returns when all have said it, so it is a barrier too."""


class RankMessage(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank tells the others before they write, and after."""

    error: str = ""
    layout: str = ""
    """Its digest."""
    shards: tuple[TensorShard, ...] = ()
    turn: WriteTicket | None = None
    """From the first rank on a node: where those there write."""
    newest: int | None = None
    """From the same: the version that an earlier trainer has left."""


class ShardStore:
    """One rank's end of the window of its node; the first rank there makes it with the first version."""

    def __init__(
        self,
        key: WindowKey,
        *,
        job: JobDir,
        layout: TensorLayout,
        rank: int,
        all_gather: AllGather,
        parts: PartAssignment | None = None,
    ) -> None:
        """`parts`: what lies where if the ranks are on several nodes, and then `key` is that of this node's part."""
        self._key = key
        self._job = job
        self._layout = layout
        self._rank = rank
        self._all_gather = all_gather
        self._parts = parts
        self._writer = 0 if parts is None else parts.writer(rank)
        self._own_layout = layout if parts is None else parts.layouts[parts.nodes[rank]]
        self._window: Window | None = None
        self._checked_shards: list[tuple[TensorShard, ...]] | None = None
        self._earlier_versions: tuple[int | None, ...] = ()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shards")
        self._background: list[Future[Any]] = []

    # ---- every rank

    def stage(self, shards: LocalShards, weight_version: WeightVersion) -> None:
        """Copy this rank's boxes into the slot; all ranks call it, and the tensors may change when it returns.

        WeightsError, on all ranks alike: a tensor is missing, extra, held twice, of a wrong shape or type, or there
        is no window to write to.
        """
        ticket, error = self._agree_on_ticket(shards, weight_version), ""
        try:
            window = self._join_window()
            with window.joint_write(ticket) as slot:
                _fill_slot(slot, self._own_layout, shards)
        except WeightsError as found:
            error = str(found)
        self._gather_messages(RankMessage(error=error))
        self._earlier_versions = ()
        if self._rank != self._writer:
            self._run_in_background(lambda: _share_checksums(window, ticket))
        elif self._rank != 0:
            self._run_in_background(window.commit)

    def find_earlier_versions(self) -> None:
        """Learn what an earlier trainer has left on all nodes; all ranks call it, before the first version."""
        newest = None
        if self._rank == self._writer:
            self._window = Window.open(self._key, job=self._job.number)
            manifest = None if self._window is None else self._window.newest()
            newest = None if manifest is None else manifest.version
        messages = self._gather_messages(RankMessage(newest=newest))
        self._earlier_versions = tuple(messages[writer].newest for writer in self._writers())

    def write_part(self, version: int, directory: Path) -> None:
        """If this rank commits for its node: leave its part of what was staged there, behind everything else."""
        if self._rank == self._writer and (window := self._window) is not None:
            self._run_in_background(lambda: part_files.leave_window(window, version, directory, rank=self._rank))

    def unlink(self) -> None:
        """Remove the name of a window that this rank made; for the trainer's end."""
        if self._window is not None and self._window.role == "writer":
            self._window.unlink()

    def close(self) -> None:
        """Let go of the window; its name stays."""
        self._thread.shutdown()
        if self._window is not None:
            self._window.close()
            self._window = None

    # ---- rank 0

    def commit(self, _: None = None) -> VersionManifest:
        """Make what was staged visible; the ranks share the checksums. Safe in another thread than `stage`."""
        assert self._window is not None, "stage comes before commit"
        return self._window.commit()

    def newest(self) -> VersionManifest | None:
        """The newest complete version; also what an earlier trainer of this job left, if all nodes have it."""
        if self._window is None:
            self._window = Window.open(self._key, job=self._job.number)
        if self._window is None or len(set(self._earlier_versions)) > 1:
            return None
        return self._window.newest()

    def newest_started(self) -> int | None:
        """The newest version that ever came into a window, be it on one node alone."""
        newest = self.newest()
        candidates = [*self._earlier_versions, None if newest is None else newest.version]
        return max((version for version in candidates if version is not None), default=None)

    def make_saver(self, files: FileStore, weight_version: WeightVersion) -> Callable[[], object]:
        """What writes a version to files once it is committed."""
        return lambda: self._save(files, weight_version)

    def make_gatherer(
        self, files: FileStore, weight_version: WeightVersion, *, directory: Path
    ) -> Callable[[], object]:
        """The same where the parts of other nodes are left in `directory`."""
        return lambda: self._gather(files, weight_version, directory=directory)

    # ---- inside

    def _agree_on_ticket(self, shards: LocalShards, weight_version: WeightVersion) -> WriteTicket:
        """Where to write, once all ranks have said what they hold and it is right."""
        error, ticket, boxes = "", None, tuple(shard for shard, _ in shards)
        try:
            self._wait_for_background()
            _check_values(shards, self._layout)
            if self._rank == self._writer:
                ticket = self._start_version(weight_version)
        except WeightsError as found:
            error = str(found)
        messages = self._gather_messages(
            RankMessage(error=error, layout=self._layout.digest(), shards=boxes, turn=ticket)
        )
        for rank, message in enumerate(messages):
            if message.layout != messages[0].layout:
                raise WeightsError(f"rank {rank} has another layout than rank 0: do both hold the same model?")
        held_by_rank = [message.shards for message in messages]
        if held_by_rank != self._checked_shards:
            self._check_assignment(held_by_rank)
            self._checked_shards = held_by_rank
        ticket = messages[self._writer].turn
        assert ticket is not None, "it has begun, or has said why not"
        return ticket

    def _check_assignment(self, held_by_rank: list[tuple[TensorShard, ...]]) -> None:
        """WeightsError unless all ranks together hold the model, and each node what its window is made for."""
        if self._parts is None:
            check_cover(self._layout, held_by_rank)
        elif (
            PartAssignment.from_shards(self._layout, nodes=self._parts.nodes, held_by_rank=held_by_rank) != self._parts
        ):
            raise WeightsError("the ranks hold other boxes of the weights than when they began: start the trainer anew")

    def _gather_messages(self, message: RankMessage) -> list[RankMessage]:
        """What all ranks say; WeightsError, on all of them, if one has found something wrong."""
        messages = [
            msgspec.msgpack.decode(data, type=RankMessage) for data in self._all_gather(msgspec.msgpack.encode(message))
        ]
        if wrong := [f"rank {rank}: {message.error}" for rank, message in enumerate(messages) if message.error]:
            raise WeightsError("; ".join(wrong))
        return messages

    def _start_version(self, weight_version: WeightVersion) -> WriteTicket:
        if self._window is None or self._window.role != "writer":
            self._close_window()
            self._window = Window.create(self._key, self._own_layout, job=self._job)
        self._window.start_version(weight_version.version, step=weight_version.step)
        return self._window.ticket()

    def _join_window(self) -> Window:
        """This rank's end of the window that the first one here has made, perhaps anew."""
        if self._rank != self._writer and (self._window is None or not self._window.is_current()):
            self._close_window()
            self._window = Window.join(self._key, job=self._job.number)
        assert self._window is not None
        return self._window

    def _writers(self) -> list[int]:
        return [0] if self._parts is None else list(self._parts.writers().values())

    def _save(self, files: FileStore, weight_version: WeightVersion) -> None:
        assert self._window is not None, "there is a version to read"
        with self._window.read_version(weight_version.version) as slot:
            files.publish(view_tensors(slot, self._layout), weight_version)

    def _gather(self, files: FileStore, weight_version: WeightVersion, *, directory: Path) -> None:
        assert self._window is not None, "there is a version to read"
        assert self._parts is not None, "other nodes leave their parts"
        parts = {writer: self._parts.layouts[node] for node, writer in self._parts.writers().items()}
        with self._window.read_version(weight_version.version) as slot:
            tensors = part_files.iterate_tensors(self._layout, slot, parts, directory, rank=self._rank)
            files.publish_each(self._layout, tensors, weight_version)
        remove_path(directory)

    def _run_in_background(self, work: Callable[[], Any]) -> None:
        """Do it while training goes on; one thing after the other."""
        self._background.append(self._thread.submit(work))

    def _wait_for_background(self) -> None:
        """Wait for what is behind; what went wrong there is raised here."""
        background, self._background = self._background, []
        for future in background:
            future.result()

    def _close_window(self) -> None:
        if self._window is not None:
            self._window.close()
            self._window = None


def make_all_gather(group: torch.distributed.ProcessGroup | None = None) -> AllGather:
    """Over a group of processes on CPUs (gloo): sizes first, then the bytes, padded to the largest."""

    def all_gather(said: bytes) -> list[bytes]:
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(torch.distributed.get_world_size(group))]
        torch.distributed.all_gather(sizes, torch.tensor([len(said)]), group=group)
        largest = max(int(size) for size in sizes)
        heard = [torch.zeros(largest, dtype=torch.uint8) for _ in sizes]
        mine = torch.frombuffer(bytearray(said.ljust(largest, b"\0")), dtype=torch.uint8)
        torch.distributed.all_gather(heard, mine, group=group)
        return [bytes(text[: int(size)].numpy()) for text, size in zip(heard, sizes, strict=True)]

    return all_gather


def _check_values(shards: LocalShards, layout: TensorLayout) -> None:
    tensors = layout.tensors_by_name()
    for shard, values in shards:
        check_shard(shard, tensors, dtype=str(values.dtype).removeprefix("torch."), shape=tuple(values.shape))


def _fill_slot(slot: memoryview, layout: TensorLayout, shards: LocalShards) -> None:
    """Each box with one strided copy, from whatever device it is on, into the box of the layout that holds it."""
    tensors, boxes = view_tensors(slot, layout), defaultdict[str, list[TensorSlot]](list)
    for box in layout.tensors:
        boxes[box.shard.name].append(box)
    for shard, values in shards:
        for box in boxes[shard.name] if shard.num_values else ():
            if (index := shard.index_in(box.shard)) is not None:
                tensors[box.name][index].copy_(values.detach())


def _share_checksums(window: Window, ticket: WriteTicket) -> None:
    """Take a share of the checksums; rank 0 may have been quicker, and then there is nothing left to do."""
    with contextlib.suppress(WeightsError), window.joint_write(ticket):
        window.compute_checksums(ticket)
