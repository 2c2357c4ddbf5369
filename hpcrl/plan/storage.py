"""The space that a campaign needs for checkpoints and weights where it is stored. Pure.

StorageNeed        the need, in GiB
estimate_storage   that of a recipe
"""

from typing import NamedTuple

from hpcrl.config.published_dtype import choose_published_dtype
from hpcrl.config.recipe import Recipe
from hpcrl.hardware.memory_model import BYTES_FP32, GIB, compute_window_bytes
from hpcrl.hardware.train_memory import NUM_SAVED_PARTS, count_trained_params
from hpcrl.plan.demand import make_rank_setup


class StorageNeed(NamedTuple):
    """The most space that is needed at a time; trajectories come on top of it."""

    checkpoints_gib: float
    versions_gib: float
    num_checkpoints: int
    """Checkpoints that are there at a time: those that are kept, and one that is being written."""

    @property
    def gib(self) -> float:
        return self.checkpoints_gib + self.versions_gib

    def describe(self) -> str:
        """Describe the need to a person."""
        each = _show(self.checkpoints_gib / self.num_checkpoints)
        return (
            f"{_show(self.gib)} for {self.num_checkpoints} checkpoints of {each} and versions of the weights "
            f"({_show(self.versions_gib)}), besides trajectories"
        )


def _show(gib: float) -> str:
    return f"{gib / 1024:.1f} TiB" if gib >= 1024 else f"{gib:.3g} GiB"


def estimate_storage(recipe: Recipe) -> StorageNeed | None:
    """Estimate the space for checkpoints and versions; None if the size of the model is not known."""
    shape, train = recipe.model.architecture, recipe.train
    if shape is None:
        return None
    setup = make_rank_setup(recipe, has_recompute=True)
    saved = count_trained_params(shape, setup) * NUM_SAVED_PARTS * BYTES_FP32
    num = train.keep_checkpoints + train.keep_best + 1
    two_versions = compute_window_bytes(shape.num_params, dtype=choose_published_dtype(recipe, recipe.model.config))
    return StorageNeed(
        checkpoints_gib=num * saved / GIB,
        versions_gib=two_versions / 2 * train.keep_versions / GIB,
        num_checkpoints=num,
    )
