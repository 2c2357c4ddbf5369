"""The store of windows that the ranks of a trainer fill together: a full tensor is assembled nowhere.

    ShardStore       one rank's end: every rank stages the shards that it holds, and rank 0 commits
    RankMessage      what a rank sends to the others before they write, and after
    AllGather        sends every rank's message to all ranks
    make_all_gather  make one over a torch.distributed group
    LocalShards      the shards of a rank
    ShardValues      the values of one
    ListShards       a function that returns those of a rank

    store = ShardStore(make_window_key(campaign, node=node), job=job, layout=layout, rank=rank, all_gather=all_gather)
    store.stage(shards, weight_version)         # on every rank; training continues when it returns
    store.commit()                              # on rank 0, in any thread: WeightPublisher does it

An error of any rank is raised by all ranks, before anything is visible; the version before stays in use.

On one node the window is the one that its engines read. On several, each node has a window for its part
(`PartAssignment`), which the first rank there commits; only couriers join the parts, on the nodes with engines.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import torch
import torch.distributed

from hpcrl.campaign_dir.paths import JobDir
from hpcrl.errors import WeightsError
from hpcrl.system.files import remove_path
from hpcrl.weights.layout import PartAssignment, TensorLayout, TensorShard, TensorSlot, check_cover, check_shard
from hpcrl.weights.stores import part_files
from hpcrl.weights.stores.background import BackgroundWork
from hpcrl.weights.stores.file_store import FileStore
from hpcrl.weights.stores.store import WeightStore, copy_values, view_tensors
from hpcrl.weights.versions import VersionManifest, WeightVersion
from hpcrl.weights.window.file import WindowKey
from hpcrl.weights.window.window import Window, WriteTicket


class ShardValues(Protocol):
    """The values of a shard: a tensor, or what computes one when it is copied."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> torch.Size: ...

    def detach(self) -> torch.Tensor: ...


LocalShards = Sequence[tuple[TensorShard, ShardValues]]
"""The shards that a rank holds: where each belongs, and its values."""
ListShards = Callable[[], LocalShards]
"""Returns them; all ranks must call it together."""
AllGather = Callable[[bytes], list[bytes]]
"""Returns the messages of all ranks, in their order, once all have sent theirs; so it is a barrier too."""


class RankMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The message of a rank to the others before they write, and after."""

    error: str = ""
    layout: str = ""
    """Digest of the layout."""
    shards: tuple[TensorShard, ...] = ()
    turn: WriteTicket | None = None
    """Set by the first rank on a node: where the ranks there write."""
    newest: int | None = None
    """Set by the same rank: the version that an earlier trainer has left."""


class ShardStore:
    """The end of a node's window for one rank; the first rank there creates it with the first version."""

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
        """Set `parts`, and make `key` that of this node's part, if the ranks are on several nodes."""
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
        self._background = BackgroundWork(name="shards")

    # ---- every rank

    def stage(self, shards: LocalShards | ListShards, weight_version: WeightVersion) -> None:
        """Copy this rank's shards into the slot; all ranks call it, and the tensors may change when it returns.

        Raise WeightsError, on all ranks, if a tensor is missing, extra, held twice, or of a wrong shape or type, or
        if the window cannot be written to.
        """
        if callable(shards):
            shards = shards()
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
            self._background.run(lambda: _share_checksums(window, ticket))
        elif self._rank != 0:
            self._background.run(window.commit)

    def find_earlier_versions(self) -> None:
        """Find the versions that an earlier trainer has left; all ranks call it, before the first version."""
        newest = None
        if self._rank == self._writer:
            self._window = Window.open(self._key, job=self._job.number)
            manifest = None if self._window is None else self._window.newest()
            newest = None if manifest is None else manifest.version
        messages = self._gather_messages(RankMessage(newest=newest))
        self._earlier_versions = tuple(messages[writer].newest for writer in self._writers())

    def write_part(self, version: int, directory: Path) -> None:
        """Write the node's part of a version in the background, after other work, if this rank commits for its node."""
        if self._rank == self._writer and (window := self._window) is not None:
            self._background.run(lambda: part_files.leave_window(window, version, directory, rank=self._rank))

    def unlink(self) -> None:
        """Remove the name of a window that this rank created, at the trainer's end."""
        if self._window is not None and self._window.role == "writer":
            self._window.unlink()

    def close(self) -> None:
        """Close the window; its name stays."""
        self._background.close()
        if self._window is not None:
            self._window.close()
            self._window = None

    # ---- rank 0

    def commit(self, _: None = None) -> VersionManifest:
        """Make what was staged visible; the ranks share the checksums. It is safe in another thread than `stage`."""
        assert self._window is not None, "stage comes before commit"
        return self._window.commit()

    def newest(self) -> VersionManifest | None:
        """Return the newest complete version, or the one of an earlier trainer of this job if all nodes have it."""
        if self._window is None:
            self._window = Window.open(self._key, job=self._job.number)
        if self._window is None or len(set(self._earlier_versions)) > 1:
            return None
        return self._window.newest()

    def newest_started(self) -> int | None:
        """Return the newest version that was ever in a window, even on one node alone."""
        newest = self.newest()
        candidates = [*self._earlier_versions, None if newest is None else newest.version]
        return max((version for version in candidates if version is not None), default=None)

    def make_saver(self, files: FileStore, weight_version: WeightVersion) -> Callable[[], object]:
        """Return what writes a version to files once it is committed."""
        return lambda: self._save(files, weight_version)

    def make_gatherer(
        self, files: FileStore, weight_version: WeightVersion, *, directory: Path
    ) -> Callable[[], object]:
        """Return what writes a version to files if other nodes write their parts to `directory`."""
        return lambda: self._gather(files, weight_version, directory=directory)

    # ---- inside

    def _agree_on_ticket(self, shards: LocalShards, weight_version: WeightVersion) -> WriteTicket:
        """Return the place to write, once all ranks have sent what they hold and it is checked."""
        error, ticket, own_shards = "", None, tuple(shard for shard, _ in shards)
        try:
            self._background.wait()
            _check_values(shards, self._layout)
            if self._rank == self._writer:
                ticket = self._start_version(weight_version)
        except WeightsError as found:
            error = str(found)
        messages = self._gather_messages(
            RankMessage(error=error, layout=self._layout.digest(), shards=own_shards, turn=ticket)
        )
        for rank, message in enumerate(messages):
            if message.layout != messages[0].layout:
                raise WeightsError(f"rank {rank} has a different layout from rank 0: do both hold the same model?")
        held_by_rank = [message.shards for message in messages]
        if held_by_rank != self._checked_shards:
            self._check_assignment(held_by_rank)
            self._checked_shards = held_by_rank
        ticket = messages[self._writer].turn
        assert ticket is not None, "the writer has started the version, or sent an error"
        return ticket

    def _check_assignment(self, held_by_rank: list[tuple[TensorShard, ...]]) -> None:
        """Raise WeightsError unless all ranks together hold the model, and each node the part its window is for."""
        if self._parts is None:
            check_cover(self._layout, held_by_rank)
        elif (
            PartAssignment.from_shards(self._layout, nodes=self._parts.nodes, held_by_rank=held_by_rank) != self._parts
        ):
            raise WeightsError("the ranks hold other shards of the weights than at the start: restart the trainer")

    def _gather_messages(self, message: RankMessage) -> list[RankMessage]:
        """Exchange messages with all ranks; WeightsError, on all of them, if one reports an error."""
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
        """Return this rank's end of the window that the first rank here has created, or created again."""
        if self._rank != self._writer and (self._window is None or not self._window.is_current()):
            self._close_window()
            self._window = Window.join(self._key, job=self._job.number)
        assert self._window is not None
        return self._window

    def _writers(self) -> list[int]:
        return [0] if self._parts is None else list(self._parts.writers().values())

    def _save(self, files: WeightStore, weight_version: WeightVersion) -> None:
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

    def _close_window(self) -> None:
        if self._window is not None:
            self._window.close()
            self._window = None


def make_all_gather(group: torch.distributed.ProcessGroup | None = None) -> AllGather:
    """Make it for a group of processes on CPUs (gloo): sizes are sent first, then bytes, padded to the largest."""

    def all_gather(message: bytes) -> list[bytes]:
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(torch.distributed.get_world_size(group))]
        torch.distributed.all_gather(sizes, torch.tensor([len(message)]), group=group)
        largest = max(int(size) for size in sizes)
        received = [torch.zeros(largest, dtype=torch.uint8) for _ in sizes]
        own = torch.frombuffer(bytearray(message.ljust(largest, b"\0")), dtype=torch.uint8)
        torch.distributed.all_gather(received, own, group=group)
        return [bytes(text[: int(size)].numpy()) for text, size in zip(received, sizes, strict=True)]

    return all_gather


def _check_values(shards: LocalShards, layout: TensorLayout) -> None:
    tensors = layout.tensors_by_name()
    for shard, values in shards:
        check_shard(shard, tensors, dtype=str(values.dtype).removeprefix("torch."), shape=tuple(values.shape))


def _fill_slot(slot: memoryview, layout: TensorLayout, shards: LocalShards) -> None:
    """Copy each shard, from any device, into the slot of the layout that holds it, rounded to the slot's type."""
    tensors, shard_slots = view_tensors(slot, layout), defaultdict[str, list[TensorSlot]](list)
    for shard_slot in layout.tensors:
        shard_slots[shard_slot.shard.name].append(shard_slot)
    for shard, values in shards:
        for shard_slot in shard_slots[shard.name] if shard.num_values else ():
            if (index := shard.index_in(shard_slot.shard)) is not None:
                copy_values(values.detach(), tensors[shard_slot.name][index])


def _share_checksums(window: Window, ticket: WriteTicket) -> None:
    """Compute a share of the checksums; if rank 0 was faster, there is nothing left to do."""
    with contextlib.suppress(WeightsError), window.joint_write(ticket):
        window.compute_checksums(ticket)
