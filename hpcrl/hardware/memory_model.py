"""Estimate memory from the size of a model. Pure.

engine_memory_gib, train_memory_gib    of one worker
fixed_memory_gib                       of a trainer's worker for a model that does not train
compute_window_bytes                   of a node's weight window
num_env_places                         environments that fit into an env worker
GIB, BYTES_BF16, BYTES_FP32, BYTES_PER_VALUE, TRAIN_BYTES_PER_PARAM, FIXED_BYTES_PER_PARAM    constants
MIN_KV_SHARE, ENV_WORKER_GIB           more of them
"""

GIB = 2**30
BYTES_BF16 = 2
BYTES_FP32 = 4
BYTES_PER_VALUE = {"float32": BYTES_FP32, "bfloat16": BYTES_BF16, "float16": BYTES_BF16}
"""Bytes of a published weight, by its dtype."""
TRAIN_BYTES_PER_PARAM = 16
"""Bytes per weight in mixed precision training: bf16 weight and gradient, fp32 master copy, two AdamW moments."""
FIXED_BYTES_PER_PARAM = 4
"""Bytes per weight of a model that the trainer only reads, such as a teacher: fp32, as it is loaded."""
MIN_KV_SHARE = 0.25
"""Smallest share of an engine's memory for KV; with less, long trajectories no longer fit."""
ENV_WORKER_GIB = 1.0
"""Memory of an env worker itself: its episodes, its tokenizer, environments that run in its process."""


def engine_memory_gib(num_params: int) -> float:
    """Return the memory that one inference worker needs for its weights and a useful KV cache."""
    return num_params * BYTES_BF16 / GIB / (1 - MIN_KV_SHARE)


def compute_window_bytes(num_params: int, *, dtype: str) -> float:
    """Return the shared memory of a node's weight window: two versions, however many workers map them."""
    return float(2 * num_params * BYTES_PER_VALUE[dtype])


def train_memory_gib(num_params: int, *, num_workers: int) -> float:
    """Return the memory that one training worker needs for weights, gradients and optimizer state, sharded evenly."""
    return num_params * TRAIN_BYTES_PER_PARAM / GIB / num_workers


def fixed_memory_gib(num_params: int, *, num_shards: int) -> float:
    """Return the memory that one training worker needs for a model that does not train, split over `num_shards`."""
    return num_params * FIXED_BYTES_PER_PARAM / GIB / num_shards


def num_env_places(mem_gib: float, *, each_gib: float) -> int:
    """Return the number of isolated environments that fit into an env worker's memory, beside the worker itself."""
    return max(int((mem_gib - ENV_WORKER_GIB) / each_gib), 0)
