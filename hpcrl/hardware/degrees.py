"""The division of the work on one copy of a model over the ranks of the trainer.

ParallelDegrees   the ranks that divide each kind of work
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
