"""Publishing from all ranks of a trainer at once: each puts the boxes that it holds into the window of their node.

    shard_store   a rank's end of the window, where all ranks are on one node
    LedStore      rank 0's: whoever stages through it has all ranks stage
    boxes         what a rank puts in

Nowhere is a whole tensor assembled. Ranks on several nodes share no window: there the weights are gathered on rank 0.
"""

from collections.abc import Callable, Iterator
from typing import Protocol

from torch import Tensor

from hpcrl.endpoints import this_node
from hpcrl.rundir import JobDir
from hpcrl.trainers.state import Piece
from hpcrl.trainers.world import World
from hpcrl.weights.layout import Layout, Shard
from hpcrl.weights.shards import Exchange, Shards, ShardStore, exchange_over
from hpcrl.weights.window import Key

Tell = Callable[[int, int], None]
DTYPE = "float32"
"""Of the weights that trainers hold, and so of what is published."""


class Sharded(Protocol):
    """A trainer's rank, as far as its weights are concerned."""

    world: World

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the model, whoever holds it; the same on all ranks."""

    def shards(self) -> Iterator[Piece]:
        """The boxes that this rank gives, each value once over all ranks."""


class LedStore(ShardStore):
    """Rank 0's end of the window; `tell(version, step)` has the others stage too, since all must."""

    def __init__(self, key: Key, *, job: JobDir, layout: Layout, exchange: Exchange, tell: Tell) -> None:
        super().__init__(key, job=job, layout=layout, rank=0, exchange=exchange)
        self._tell = tell

    def stage(self, shards: Shards, *, version: int, step: int) -> None:
        self._tell(version, step)
        super().stage(shards, version=version, step=step)


def shard_store(mine: Sharded, key: Key, *, job: JobDir, tell: Tell | None = None) -> ShardStore | None:
    """This rank's end of the window; None, on all ranks, if they are on several nodes. All ranks call it."""
    rank, exchange = mine.world.rank, exchange_over(mine.world.cpu_group)
    if len(set(exchange(this_node().encode()))) > 1:
        return None
    layout = Layout.pack((name, DTYPE, shape) for name, shape in mine.shapes().items())
    if tell is not None:
        return LedStore(key, job=job, layout=layout, exchange=exchange, tell=tell)
    return ShardStore(key, job=job, layout=layout, rank=rank, exchange=exchange)


def boxes(mine: Sharded) -> list[tuple[Shard, Tensor]]:
    """What this rank stages."""
    return [(piece.shard, piece.tensor) for piece in mine.shards()]
