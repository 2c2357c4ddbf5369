"""The speed of the engines of a recipe by the cost model: this is the one place that knows their settings. Pure.

estimate_engine_speed  seconds that an engine takes
divide_engine_gpus     the GPUs within a stage of each copy of the model, and the stages
round_weights          the model as its GPUs hold it
find_value_bytes       the bytes of a number that an engine computes with
count_copy_bytes       the bytes of weights of each copy of a model
"""

import msgspec

from hpcrl.config.recipe import EngineConfig
from hpcrl.hardware.architecture import ModelArchitecture
from hpcrl.hardware.cost_model import ModelShape, WorkerSpeed, estimate_speed, make_model_shape
from hpcrl.hardware.gpus import GpuModel
from hpcrl.hardware.memory_model import BYTES_BF16, BYTES_FP8, BYTES_FP32, BYTES_PER_VALUE


def estimate_engine_speed(engine: EngineConfig, *, gpu: GpuModel, shape: ModelShape, num_gpus: int) -> WorkerSpeed:
    """Estimate the speed of an engine with `num_gpus` GPUs on all its nodes; 0 counts as one."""
    tp, pp = divide_engine_gpus(engine, num_gpus=num_gpus)
    rounded = round_weights(shape, engine, gpu=gpu)
    return estimate_speed(gpu, shape=rounded, tp=tp, pp=pp, num_copies=engine.data_parallel)


def divide_engine_gpus(engine: EngineConfig, *, num_gpus: int) -> tuple[int, int]:
    """Return the GPUs of a copy of the model that share each layer, and its stages."""
    if engine.backend == "embedded":
        return 1, 1  # the whole model is on the first one
    num_stages = engine.pipeline_parallel
    return max(1, num_gpus // (num_stages * engine.data_parallel)), num_stages


def round_weights(shape: ModelShape, engine: EngineConfig, *, gpu: GpuModel) -> ModelShape:
    """Return the shape with the bytes of the engine's numbers; a GPU without FP8 computes rounded ones in bfloat16."""
    value_bytes = find_value_bytes(engine)
    if engine.quantization == "none":
        return msgspec.structs.replace(shape, weight_bytes=value_bytes, kv_bytes=value_bytes)
    factor_bytes = BYTES_FP8 if gpu.has_fp8 else BYTES_BF16
    return msgspec.structs.replace(shape, weight_bytes=BYTES_FP8, factor_bytes=factor_bytes)


def find_value_bytes(engine: EngineConfig) -> int:
    """Return the bytes of a number in KV, and in weights that are not quantized.

    The embedded engine has float32. vLLM converts float32 to 16 bits with dtype "auto".
    """
    if engine.backend == "embedded":
        return BYTES_FP32
    return BYTES_PER_VALUE.get(engine.dtype, BYTES_BF16) if engine.backend == "vllm" else BYTES_BF16


def count_copy_bytes(engine: EngineConfig, num_params: int, architecture: ModelArchitecture | None) -> float:
    """Return the bytes of weights of each copy of a model in an engine, which have equal parts of its experts.

    vLLM divides experts among the GPUs of all copies, with `engine.expert_parallel` whole ones, without it the rows of
    each. Of a model whose architecture is not known, every copy counts as having all weights, and all are rounded.
    """
    weight_bytes = find_value_bytes(engine) if engine.quantization == "none" else BYTES_FP8
    if architecture is None:
        return float(num_params * weight_bytes)
    shape = msgspec.structs.replace(make_model_shape(architecture), weight_bytes=weight_bytes)
    return shape.count_held_bytes(engine.data_parallel)
