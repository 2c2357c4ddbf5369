"""Which node of a trainer holds what of a version: each keeps its own part, and nowhere is the whole put together.

Parts       for every rank its node, for every node the layout of its part
part_of     the boxes of some ranks as the layout of a window, joined to larger boxes where they fill one
joined      the layout of the whole, from those of all its parts
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hpcrl.errors import WeightsError
from hpcrl.weights.layout import Layout, Placed, Shard, check_cover, whole


@dataclass(frozen=True, kw_only=True)
class Parts:
    """How the ranks of a trainer lie on nodes."""

    nodes: tuple[str, ...]
    """Of every rank."""
    layouts: dict[str, Layout]
    """Of every node's window."""

    @classmethod
    def of(cls, layout: Layout, *, nodes: Sequence[str], held: Sequence[Sequence[Shard]]) -> "Parts":
        """What lies where if the ranks on these nodes hold these boxes; WeightsError if they do not make the whole."""
        check_cover(layout, held)
        shards: dict[str, list[Shard]] = {node: [] for node in nodes}
        for node, boxes in zip(nodes, held, strict=True):
            shards[node] += [shard for shard in boxes if shard.num_values]
        shards[nodes[0]] += [whole(tensor) for tensor in layout.tensors if not math.prod(tensor.shape)]
        return cls(nodes=tuple(nodes), layouts={node: part_of(layout, boxes) for node, boxes in shards.items()})

    def writer(self, rank: int) -> int:
        """The rank that commits what this one stages."""
        return self.nodes.index(self.nodes[rank])

    def writers(self) -> dict[str, int]:
        """On each node the rank that makes its window and commits: the first one there."""
        return {node: self.nodes.index(node) for node in self.layouts}


def part_of(layout: Layout, shards: Iterable[Shard]) -> Layout:
    """These boxes, in the order of their tensors."""
    by_name: dict[str, list[Shard]] = {}
    for shard in shards:
        by_name.setdefault(shard.name, []).append(shard)
    return Layout.of_boxes(
        (box, tensor) for tensor in layout.tensors for box in _filled(by_name.get(tensor.name, []), tensor)
    )


def joined(parts: Sequence[Layout]) -> Layout:
    """All tensors of which the parts hold boxes; WeightsError unless they hold every value once."""
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for part in parts:
        for box in part.tensors:
            seen = (box.dtype, box.shape if box.cut is None else box.cut.shape)
            if tensors.setdefault(box.shard.name, seen) != seen:
                raise WeightsError(
                    f"tensor {box.shard.name!r} is {seen[0]} {list(seen[1])} on one node of the trainer and "
                    f"{tensors[box.shard.name]} on another: do all ranks hold the same model?"
                )
    layout = Layout.pack((name, dtype, shape) for name, (dtype, shape) in tensors.items())
    check_cover(layout, [[box.shard for box in part.tensors] for part in parts])
    return layout


def _filled(shards: list[Shard], tensor: Placed) -> list[Shard]:
    """The box that these fill together, if they do; they do not meet."""
    if len(shards) < 2:
        return shards
    low = tuple(map(min, zip(*(shard.start for shard in shards), strict=True)))
    ends = [[start + size for start, size in zip(shard.start, shard.shape, strict=True)] for shard in shards]
    shape = tuple(max(end) - start for end, start in zip(zip(*ends, strict=True), low, strict=True))
    if math.prod(shape) == sum(shard.num_values for shard in shards):
        return [Shard(name=tensor.name, start=low, shape=shape)]
    return sorted(shards, key=lambda shard: shard.start)
