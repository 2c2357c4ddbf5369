"""Publish from all ranks of a trainer at once: each writes its shards into the window of its node.

    open_shard_store    a rank's store: the engines' window if all ranks are on one node, else one for its part
    LeaderShardStore    rank 0's store: to stage or save through it makes all ranks do so
    WindowOrders        the orders by which rank 0 involves the others
    RankShards          a rank's node and shards, exchanged at the start
    make_published_layout  all tensors in the types in which they are published

A tensor that is spread over several nodes is assembled only for files, and then one tensor at a time.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec

from hpcrl.campaign_dir.paths import JobDir
from hpcrl.config.recipe import WeightsDtype
from hpcrl.system.network import current_node
from hpcrl.trainers.base import RankTrainer
from hpcrl.weights.layout import PartAssignment, TensorLayout, TensorShard
from hpcrl.weights.stores import part_files
from hpcrl.weights.stores.file_store import FileStore
from hpcrl.weights.stores.sharded_store import AllGather, ListShards, LocalShards, ShardStore, make_all_gather
from hpcrl.weights.versions import WeightVersion
from hpcrl.weights.window.file import WindowKey


class WindowOrders(NamedTuple):
    """The orders of rank 0 that make the others do as it does."""

    stage: Callable[[WeightVersion], None]
    write_parts: Callable[[int, Path], None]
    """A call with a version and the directory to write to."""


class RankShards(msgspec.Struct, frozen=True, kw_only=True):
    """The node and the shards of a rank, exchanged at the start."""

    node: str
    shards: tuple[TensorShard, ...]


class LeaderShardStore(ShardStore):
    """The store of rank 0; it orders the other ranks to do the same, since all must take part."""

    def __init__(
        self,
        key: WindowKey,
        *,
        job: JobDir,
        layout: TensorLayout,
        all_gather: AllGather,
        orders: WindowOrders,
        parts: PartAssignment | None = None,
    ) -> None:
        super().__init__(key, job=job, layout=layout, rank=0, all_gather=all_gather, parts=parts)
        self._orders = orders

    def stage(self, shards: LocalShards | ListShards, weight_version: WeightVersion) -> None:
        self._orders.stage(weight_version)
        super().stage(shards, weight_version)

    def make_saver(self, files: FileStore, weight_version: WeightVersion) -> Callable[[], object]:
        """Order the other nodes to write their parts between steps; return what assembles them in the background."""
        if self._parts is None:
            return super().make_saver(files, weight_version)
        directory = part_files.make_parts_directory(files.directory)
        self._orders.write_parts(weight_version.version, directory)
        return self.make_gatherer(files, weight_version, directory=directory)


def make_published_layout(trainer: RankTrainer, dtype: WeightsDtype) -> TensorLayout:
    """Lay out the weights in the dtype in which they are published, except the tensors that need float32."""
    precise = trainer.precise_names()
    return TensorLayout.pack(
        (name, "float32" if name in precise else dtype, shape) for name, shape in trainer.shapes().items()
    )


def open_shard_store(
    trainer: RankTrainer, key: WindowKey, *, job: JobDir, layout: TensorLayout, orders: WindowOrders | None = None
) -> ShardStore:
    """Open this rank's store in the window of its node; rank 0 passes `orders`. All ranks call it."""
    rank, all_gather = trainer.world.rank, make_all_gather(trainer.world.cpu_group)
    parts = _exchange_parts(trainer, layout, all_gather=all_gather)
    if parts is not None:
        key = replace(key, part=True)
    if orders is not None:
        store: ShardStore = LeaderShardStore(
            key, job=job, layout=layout, all_gather=all_gather, orders=orders, parts=parts
        )
    else:
        store = ShardStore(key, job=job, layout=layout, rank=rank, all_gather=all_gather, parts=parts)
    if parts is not None:
        store.find_earlier_versions()
    return store


def _exchange_parts(trainer: RankTrainer, layout: TensorLayout, *, all_gather: AllGather) -> PartAssignment | None:
    """Exchange which rank holds which shards; None on all ranks if they are on one node."""
    own = RankShards(node=current_node(), shards=tuple(shard for shard, _ in trainer.shards()))
    rank_shards = [
        msgspec.msgpack.decode(message, type=RankShards) for message in all_gather(msgspec.msgpack.encode(own))
    ]
    nodes = [shards_of_rank.node for shards_of_rank in rank_shards]
    return (
        PartAssignment.from_shards(
            layout, nodes=nodes, held_by_rank=[shards_of_rank.shards for shards_of_rank in rank_shards]
        )
        if len(set(nodes)) > 1
        else None
    )
