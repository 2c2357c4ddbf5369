"""The speed of a recipe's engines by their settings."""

import msgspec
import pytest

from hpcrl.config.engine_speed import divide_engine_gpus, estimate_engine_speed
from hpcrl.config.recipe import EngineConfig
from hpcrl.hardware.cost_model import read_model_shape
from hpcrl.hardware.gpus import GPU_CATALOGUE
from hpcrl.hardware.model_catalogue import MODEL_CONFIGS

SHAPE = read_model_shape(MODEL_CONFIGS["Qwen/Qwen3-8B"])
PLAIN = EngineConfig(backend="vllm")
FP8 = EngineConfig(backend="vllm", quantization="fp8")


def estimate(engine: EngineConfig, gpu: str):
    return estimate_engine_speed(engine, gpu=GPU_CATALOGUE[gpu], shape=SHAPE, num_gpus=1)


@pytest.mark.parametrize("gpu", ["a100-80", "h100"])
def test_weights_of_8_bits_are_read_in_half_the_time_and_leave_more_room_for_kv(gpu: str) -> None:
    plain, fp8 = estimate(PLAIN, gpu), estimate(FP8, gpu)
    assert fp8.base_step_s(1) - fp8.step_s == pytest.approx((plain.base_step_s(1) - plain.step_s) / 2)
    assert fp8.kv_tokens > plain.kv_tokens


def test_only_gpus_that_have_fp8_compute_faster_in_it() -> None:
    ratios = {gpu: estimate(FP8, gpu).token_s / estimate(PLAIN, gpu).token_s for gpu in ("a100-80", "h100")}
    assert ratios == {"a100-80": pytest.approx(1.0), "h100": pytest.approx(0.5)}


def test_stages_divide_the_gpus_of_an_engine() -> None:
    staged = msgspec.structs.replace(PLAIN, pipeline_parallel=2)
    assert divide_engine_gpus(staged, num_gpus=8) == (4, 2)
    assert divide_engine_gpus(PLAIN, num_gpus=0) == (1, 1)


EXPERTS = read_model_shape(MODEL_CONFIGS["Qwen/Qwen3-30B-A3B"])


def test_copies_of_the_model_read_and_hold_their_part_of_the_experts() -> None:
    """Those that the tokens of all copies choose."""
    copies = msgspec.structs.replace(PLAIN, data_parallel=2)
    one = estimate_engine_speed(PLAIN, gpu=GPU_CATALOGUE["h100"], shape=EXPERTS, num_gpus=2)
    two = estimate_engine_speed(copies, gpu=GPU_CATALOGUE["h100"], shape=EXPERTS, num_gpus=4)
    dense_s, expert_s = (2 * num * one.byte_s for num in (EXPERTS.num_dense, EXPERTS.num_expert))
    covered = [1 - (1 - 8 / 128) ** batch for batch in (16, 32)]
    assert one.base_step_s(16) - one.step_s == pytest.approx(dense_s + expert_s * covered[0])
    assert two.base_step_s(32) - two.step_s == pytest.approx(dense_s + expert_s * covered[1] / 2)
    assert two.kv_tokens - 2 * one.kv_tokens == pytest.approx(
        EXPERTS.num_expert * 2 / EXPERTS.kv_bytes_per_token, abs=4
    )


def test_tokens_of_copies_travel_to_the_experts_and_back() -> None:
    """As a sum over all GPUs does once, however many copies there are; the work of a token is divided."""
    gpu = GPU_CATALOGUE["h100"]
    assert gpu.link_gb_per_s is not None
    one = estimate_engine_speed(PLAIN, gpu=gpu, shape=EXPERTS, num_gpus=1)
    for num in (2, 4):
        copies = msgspec.structs.replace(PLAIN, data_parallel=num)
        several = estimate_engine_speed(copies, gpu=gpu, shape=EXPERTS, num_gpus=num)
        travel_s = gpu.fit.link * 48 * 2048 * 2 / (gpu.link_gb_per_s * 1e9)
        assert several.token_s == pytest.approx(one.token_s / num + travel_s)
        assert several.row_s == pytest.approx(one.row_s / num + travel_s)


def test_copies_of_the_model_share_the_requests_of_a_worker() -> None:
    """A worker with two copies decodes twice the batch of a worker with one in the same time, on twice the GPUs."""
    copies = msgspec.structs.replace(PLAIN, data_parallel=2)
    assert divide_engine_gpus(copies, num_gpus=8) == (4, 1)
    one = estimate_engine_speed(PLAIN, gpu=GPU_CATALOGUE["h100"], shape=SHAPE, num_gpus=4)
    two = estimate_engine_speed(copies, gpu=GPU_CATALOGUE["h100"], shape=SHAPE, num_gpus=8)
    assert two.decode_s(32, num_kv=64_000) == pytest.approx(one.decode_s(16, num_kv=32_000))
    assert two.kv_tokens == 2 * one.kv_tokens
    assert 2 * two.prefill_s(1000) == pytest.approx(one.prefill_s(1000))
