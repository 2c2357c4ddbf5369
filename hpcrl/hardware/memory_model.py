"""The memory that engines, trainers, weight windows and environments need, from the size of a model. Pure."""

GIB = 2**30
BYTES_BF16 = 2
TRAIN_BYTES_PER_PARAM = 16
"""Per weight while training in mixed precision: bf16 weight and gradient, fp32 master copy and two AdamW moments."""
MIN_KV_SHARE = 0.25
"""Of an engine's memory, the least that is left for KV; with less, long trajectories no longer fit."""
ENV_WORKER_GIB = 1.0
"""What an env worker takes by itself: its episodes, its tokenizer, environments without processes of their own."""


def engine_memory_gib(num_params: int) -> float:
    """Memory that one inference worker needs for its weights and a useful KV cache."""
    return num_params * BYTES_BF16 / GIB / (1 - MIN_KV_SHARE)


def window_memory_gib(num_params: int) -> float:
    """Shared memory that a node needs for weights on their way: two versions, however many workers map them."""
    return 2 * num_params * BYTES_BF16 / GIB


def train_memory_gib(num_params: int, *, num_workers: int) -> float:
    """Memory that one training worker needs for weights, gradients and optimizer state, sharded evenly."""
    return num_params * TRAIN_BYTES_PER_PARAM / GIB / num_workers


def num_env_places(mem_gib: float, *, each_gib: float) -> int:
    """Environments in processes of their own that fit into an env worker's memory, beside the worker itself."""
    return max(int((mem_gib - ENV_WORKER_GIB) / each_gib), 0)
