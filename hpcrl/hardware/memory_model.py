"""Estimate memory from the size of a model. Pure.

compute_engine_gib      of an engine
compute_window_bytes    of a node's weight window
num_env_places          environments that fit into an env worker
GIB, BYTES_FP8, BYTES_BF16, BYTES_FP32, BYTES_PER_VALUE, MIN_KV_SHARE, ENV_WORKER_GIB    constants
"""

GIB = 2**30
BYTES_FP8 = 1
BYTES_BF16 = 2
BYTES_FP32 = 4
BYTES_PER_VALUE = {"float32": BYTES_FP32, "bfloat16": BYTES_BF16, "float16": BYTES_BF16}
"""Bytes of a published weight, by its dtype."""
MIN_KV_SHARE = 0.25
"""Smallest share of an engine's memory for KV; with less, long trajectories no longer fit."""
ENV_WORKER_GIB = 1.0
"""Memory of an env worker itself: its episodes, its tokenizer, environments that run in its process."""


def compute_engine_gib(weight_bytes: float) -> float:
    """Return the memory that one inference worker needs for its weights and a useful KV cache."""
    return weight_bytes / GIB / (1 - MIN_KV_SHARE)


def compute_window_bytes(num_params: int, *, dtype: str) -> float:
    """Return the shared memory of a node's weight window: two versions, however many workers map them."""
    return float(2 * num_params * BYTES_PER_VALUE[dtype])


def num_env_places(mem_gib: float, *, each_gib: float) -> int:
    """Return the number of isolated environments that fit into an env worker's memory, beside the worker itself."""
    return max(int((mem_gib - ENV_WORKER_GIB) / each_gib), 0)
