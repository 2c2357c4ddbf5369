"""The division of the work on one copy of a model over the ranks of the trainer.

ParallelDegrees   the ranks that divide each kind of work
find_part_layers  the layers of one of several parts of a model
DEGREES           the names of the kinds
"""

import math

import msgspec

DEGREES = ("tensor", "pipeline", "expert", "context")


class ParallelDegrees(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of ranks that divide each layer, the layers in order, the experts, and the positions of rows."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    context: int = 1

    @property
    def num_together(self) -> int:
        """The ranks that train the same rows."""
        return self.tensor * self.context * self.pipeline

    @property
    def num_divided(self) -> int:
        """The number of which the ranks of a trainer are a multiple."""
        return self.pipeline * math.lcm(self.tensor * self.context, self.expert)

    @property
    def settings(self) -> dict[str, int]:
        """The degrees by their keys in [train]."""
        return {f"{name}_parallel": getattr(self, name) for name in DEGREES}


def find_part_layers(num_layers: int, *, num_parts: int, index: int) -> range:
    """Find the layers of a part of the model, in order.

    Where they cannot be divided evenly, parts after the first have one more: the first has the words' table too.
    """
    each, num_larger = divmod(num_layers, num_parts)
    first = index * each + min(max(index - 1, 0), num_larger)
    return range(first, first + each + (1 <= index <= num_larger))
