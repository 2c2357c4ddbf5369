"""The shards of a tensor that ranks hold.

split_tensor  even slices along an axis
"""

from itertools import pairwise

from hpcrl.weights.layout import TensorShard, TensorSlot


def split_tensor(tensor: TensorSlot, *, axis: int, num_shards: int) -> list[TensorShard]:
    """Split a tensor into `num_shards` shards along an axis, as evenly as possible, the larger ones first."""
    edges = [-(-index * tensor.shape[axis] // num_shards) for index in range(num_shards + 1)]
    return [
        TensorShard(
            name=tensor.name,
            start=tuple(low if i == axis else 0 for i in range(len(tensor.shape))),
            shape=tuple(high - low if i == axis else size for i, size in enumerate(tensor.shape)),
        )
        for low, high in pairwise(edges)
    ]
