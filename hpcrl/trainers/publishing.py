"""Publishing from all ranks of a trainer at once: each puts the boxes that it holds into the window of its node.

    shard_store   a rank's end of that window: of the engines' where all ranks are on one node, else of one for its part
    LedStore      rank 0's: whoever stages or saves through it has all ranks do so
    boxes         what a rank puts in

Nowhere is a whole tensor assembled that ranks on several nodes hold, but for files, and then one after the other.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec
from torch import Tensor

from hpcrl.campaign_dir.paths import JobDir
from hpcrl.system.network import this_node
from hpcrl.trainers.base import RankTrainer
from hpcrl.weights import part_files
from hpcrl.weights.file_store import FileStore
from hpcrl.weights.layout import Layout, Parts, Shard
from hpcrl.weights.sharded_store import Exchange, Shards, ShardStore, exchange_over
from hpcrl.weights.versions import WeightVersion
from hpcrl.weights.window.file import Key

DTYPE = "float32"
"""Of the weights that trainers hold, and so of what is published."""


class Orders(NamedTuple):
    """How rank 0 has the others do what it does."""

    stage: Callable[[WeightVersion], None]
    leave: Callable[[int, Path], None]
    """A version, and where."""


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """What ranks tell each other at the start."""

    node: str
    shards: tuple[Shard, ...]


class LedStore(ShardStore):
    """Rank 0's end of its window; the others are told what they have to do, since all must."""

    def __init__(
        self,
        key: Key,
        *,
        job: JobDir,
        layout: Layout,
        exchange: Exchange,
        orders: Orders,
        parts: Parts | None = None,
    ) -> None:
        super().__init__(key, job=job, layout=layout, rank=0, exchange=exchange, parts=parts)
        self._orders = orders

    def stage(self, shards: Shards, weight_version: WeightVersion) -> None:
        self._orders.stage(weight_version)
        super().stage(shards, weight_version)

    def saver(self, files: FileStore, weight_version: WeightVersion) -> Callable[[], object]:
        """Between steps the other nodes are told to leave their parts; behind them these are put together."""
        if self._parts is None:
            return super().saver(files, weight_version)
        directory = part_files.begun(files.directory)
        self._orders.leave(weight_version.version, directory)
        return self.gatherer(files, weight_version, directory=directory)


def shard_store(mine: RankTrainer, key: Key, *, job: JobDir, orders: Orders | None = None) -> ShardStore:
    """This rank's end of the window of its node; rank 0 gives `orders`. All ranks call it."""
    rank, exchange = mine.world.rank, exchange_over(mine.world.cpu_group)
    layout = Layout.pack((name, DTYPE, shape) for name, shape in mine.shapes().items())
    parts = _parts(mine, layout, exchange=exchange)
    if parts is not None:
        key = replace(key, part=True)
    if orders is not None:
        store: ShardStore = LedStore(key, job=job, layout=layout, exchange=exchange, orders=orders, parts=parts)
    else:
        store = ShardStore(key, job=job, layout=layout, rank=rank, exchange=exchange, parts=parts)
    if parts is not None:
        store.recall()
    return store


def _parts(mine: RankTrainer, layout: Layout, *, exchange: Exchange) -> Parts | None:
    """What lies where; None, on all ranks, if they are on one node."""
    own = Held(node=this_node(), shards=tuple(piece.shard for piece in mine.shards()))
    held = [msgspec.msgpack.decode(said, type=Held) for said in exchange(msgspec.msgpack.encode(own))]
    nodes = [one.node for one in held]
    return Parts.of(layout, nodes=nodes, held=[one.shards for one in held]) if len(set(nodes)) > 1 else None


def boxes(mine: RankTrainer) -> list[tuple[Shard, Tensor]]:
    """What this rank stages."""
    return [(piece.shard, piece.tensor) for piece in mine.shards()]
