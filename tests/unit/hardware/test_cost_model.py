"""The estimated speed of a GPU, from its figures and the model's."""

import dataclasses
import re

import msgspec
import pytest

from hpcrl.hardware.cost_model import ModelShape, TrainingWork, estimate_speed, estimate_step_s, read_model_shape
from hpcrl.hardware.gpus import GPU_CATALOGUE
from hpcrl.hardware.model_catalogue import MODEL_CONFIGS, find_model_config

LLAMA_8B = dict(
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    intermediate_size=14336,
    vocab_size=128256,
)
MOE = LLAMA_8B | dict(num_experts=64, num_experts_per_tok=4, moe_intermediate_size=1024)


def test_the_weights_of_a_dense_model_are_counted_from_its_config():
    assert read_model_shape(LLAMA_8B).num_params == pytest.approx(8.03e9, rel=0.01)


def test_a_token_uses_only_its_experts():
    shape = read_model_shape(MOE)
    assert shape.num_active < 0.25 * shape.num_params


def test_a_large_batch_reads_nearly_all_experts_and_one_token_few():
    shape = read_model_shape(MOE)
    assert shape.bytes_read(1) == pytest.approx(shape.num_active * 2)
    assert shape.bytes_read(500) == pytest.approx(shape.num_params * 2, rel=1e-3)


def test_compute_decides_prefill_and_bandwidth_helps_decoding():
    shape = read_model_shape(LLAMA_8B)
    h100, h20 = (estimate_speed(GPU_CATALOGUE[name], shape=shape) for name in ("h100", "h20"))
    assert h20.prefill_s(4000) > 5 * h100.prefill_s(4000)
    assert h20.decode_s(1, num_kv=8000) < h100.decode_s(1, num_kv=8000)


def test_known_tokens_are_attended_to_but_not_computed():
    one = estimate_speed(GPU_CATALOGUE["h100"], shape=read_model_shape(LLAMA_8B))
    assert one.prefill_s(100) < one.prefill_s(100, num_known=8000) < one.prefill_s(8100)


def test_more_gpus_are_faster_and_hold_more():
    shape = read_model_shape(LLAMA_8B)
    one, four = (estimate_speed(GPU_CATALOGUE["h100"], shape=shape, tp=tp) for tp in (1, 4))
    assert one.prefill_s(1000) / 4 < four.prefill_s(1000) < one.prefill_s(1000)  # sums over GPUs take time
    assert four.kv_tokens > 4 * one.kv_tokens


def test_gpus_with_an_unknown_link_share_the_work_without_loss():
    shape = read_model_shape(LLAMA_8B)
    gpu = msgspec.structs.replace(GPU_CATALOGUE["h100"], link_gb_per_s=None)
    one, four = (estimate_speed(gpu, shape=shape, tp=tp) for tp in (1, 4))
    assert four.prefill_s(1000) == pytest.approx(one.prefill_s(1000) / 4)


def test_a_head_of_kv_is_not_divided_among_gpus():
    shape = read_model_shape(LLAMA_8B | dict(num_key_value_heads=2))
    two, eight = (estimate_speed(GPU_CATALOGUE["h100"], shape=shape, tp=tp) for tp in (2, 8))
    assert eight.kv_byte_s == pytest.approx(two.kv_byte_s)


def test_compressed_kv_is_on_every_gpu():
    shape = read_model_shape(find_model_config("deepseek-ai/DeepSeek-V3-FP8"))
    eight, sixteen = (estimate_speed(GPU_CATALOGUE["b200"], shape=shape, tp=tp) for tp in (8, 16))
    assert sixteen.kv_byte_s == pytest.approx(eight.kv_byte_s)


def test_stages_raise_throughput_but_not_the_speed_of_one_sequence():
    shape = read_model_shape(LLAMA_8B)
    one, four = (estimate_speed(GPU_CATALOGUE["h100"], shape=shape, pp=pp) for pp in (1, 4))
    assert four.decode_s(1, num_kv=0) == pytest.approx(one.decode_s(1, num_kv=0), rel=0.1)
    assert four.decode_s(256, num_kv=256_000) < one.decode_s(256, num_kv=256_000)
    assert four.kv_tokens > 4 * one.kv_tokens


@pytest.mark.parametrize("name", sorted(MODEL_CONFIGS))
def test_the_sizes_of_a_known_model_are_those_of_its_name(name):
    billions = read_model_shape(MODEL_CONFIGS[name]).num_params / 1e9
    named = {
        "DeepSeek-V3": 671,
        "DeepSeek-V3.1": 671,
        "DeepSeek-R1": 671,
        "Kimi-K2.5": 1026,
        "MiniMax-M2.5": 229,
        "GLM-5": 744,
    }
    expected = named.get(name.rpartition("/")[2]) or float(re.search(r"(\d+)[bB](?:-|$)", name)[1])
    assert billions == pytest.approx(expected, rel=0.08)


def test_a_training_step_takes_its_operations_over_those_of_the_gpus():
    shape, gpu = read_model_shape(LLAMA_8B), GPU_CATALOGUE["h100"]
    work = TrainingWork(num_tokens=1e6, mean_length=0.0, num_gpus=8)
    assert estimate_step_s(gpu, shape=shape, work=work) == pytest.approx(
        2 * 4 * 2 * 8.03e9 * 1e6 / (8 * 989e12), rel=0.01
    )
    longer = dataclasses.replace(work, mean_length=32_000.0)
    assert estimate_step_s(gpu, shape=shape, work=longer) > 1.4 * estimate_step_s(gpu, shape=shape, work=work)
    staged = dataclasses.replace(work, pp=4, num_micro_batches=3)
    assert estimate_step_s(gpu, shape=shape, work=staged) == pytest.approx(
        2 * estimate_step_s(gpu, shape=shape, work=work)
    )


def test_a_model_that_does_not_fit_leaves_no_room_for_kv():
    shape = ModelShape(num_layers=80, num_heads=64, num_kv_heads=8, head_dim=128, num_dense=70_000_000_000)
    assert estimate_speed(GPU_CATALOGUE["h100"], shape=shape).kv_tokens == 0


def test_the_shares_of_a_batch_are_the_whole_step():
    one = estimate_speed(GPU_CATALOGUE["h100"], shape=read_model_shape(LLAMA_8B))
    share = one.reply_s(1, num_context=999.5, batch=16)
    assert 16 * share == pytest.approx(one.decode_s(16, num_kv=16 * 1000))
