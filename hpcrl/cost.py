"""What a plan costs and what a model needs, before a node-hour is spent."""

GIB = 2**30
BYTES_BF16 = 2
BYTES_TRAINED = 16
"""Per weight while training in mixed precision: bf16 weight and gradient, fp32 master copy and two AdamW moments."""
KV_SHARE = 0.25
"""Of an engine's memory, the least that is left for KV; with less, long trajectories no longer fit."""


def engine_memory_gib(num_params: int) -> float:
    """Memory that one inference worker needs for its weights and a useful KV cache."""
    return num_params * BYTES_BF16 / GIB / (1 - KV_SHARE)


def train_memory_gib(num_params: int, *, num_workers: int) -> float:
    """Memory that one training worker needs for weights, gradients and optimizer state, sharded evenly."""
    return num_params * BYTES_TRAINED / GIB / num_workers


def hours(num: int, *, walltime_min: int) -> float:
    """Node-hours (or GPU-hours) of `num` nodes (or GPUs) held for the whole walltime."""
    return round(num * walltime_min / 60, 2)
