"""What ranks of the trainer send each other, against numbers by hand."""

from dataclasses import replace

import msgspec
import pytest

from hpcrl.hardware.architecture import ModelArchitecture, read_architecture
from hpcrl.hardware.cost_model import TrainingWork, estimate_step_s, make_model_shape
from hpcrl.hardware.gpus import GPU_CATALOGUE
from hpcrl.hardware.megatron_memory import MegatronSetup
from hpcrl.hardware.model_catalogue import MODEL_CONFIGS
from hpcrl.hardware.rank_traffic import RankLinks, StepBatch, StepTraffic, estimate_traffic
from hpcrl.hardware.train_memory import RankSetup

DENSE = ModelArchitecture(
    family="llama",
    num_layers=2,
    hidden_size=4,
    vocabulary_size=10,
    is_tied=False,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    value_dim=2,
    dense_inner=8,
    dense_layers=(0, 1),
)
"""484 weights: 2 layers of 96 in attention, 96 in the MLP and 8 in norms, twice 40 of words, and the last norm."""
EXPERTS = msgspec.structs.replace(
    DENSE, dense_inner=0, dense_layers=(), num_experts=4, experts_per_token=2, expert_inner=3
)
"""324 weights beside 288 of experts."""
ONE_NODE = RankLinks(ranks_per_node=4, link=8.0, port=1.0)
TWO_NODES = replace(ONE_NODE, ranks_per_node=2)
BATCH = StepBatch(num_tokens=48, num_micro_batches=3)
SHARDED = RankSetup(num_ranks=4, is_sharded=True, is_bf16=True)
GPU = GPU_CATALOGUE["h100"]


def estimate(setup, *, shape=DENSE, links=TWO_NODES, **batch) -> StepTraffic:
    return estimate_traffic(shape, setup, batch=replace(BATCH, **batch), links=links)


def test_weights_have_their_known_numbers() -> None:
    assert DENSE.num_params == 484
    assert (EXPERTS.num_params - EXPERTS.num_expert_params, EXPERTS.num_expert_params) == (324, 288)


def test_sharded_ranks_gather_weights_in_each_pass_and_divide_the_sums_of_gradients() -> None:
    gather_s = 3 * 2 * 484 * 3 / 4 / 2  # three micro-batches, in bf16, over the ports of two ranks
    scatter_s = 3 * 4 * 484 * 3 / 4 / 2  # in float32
    assert estimate(SHARDED).beside == ((gather_s, 1), (gather_s, 1), (gather_s + scatter_s, 2))
    within = estimate(SHARDED, links=ONE_NODE)
    assert within.beside[0] == (gather_s / 4, 1), "a link is four times as fast as the ports of two ranks"
    single = estimate(msgspec.structs.replace(SHARDED, is_bf16=False))
    assert single.beside[0] == (2 * gather_s, 1)


def test_sharded_adapters_gather_all_weights_and_divide_the_gradients_of_adapters_alone() -> None:
    (once, _), _, (both, _) = estimate(msgspec.structs.replace(SHARDED, lora_rank=1)).beside
    num_adapted = 2 * ((4 + 8) + 2 * (4 + 4) + (8 + 4) + 2 * (4 + 8) + (8 + 4))  # q, k and v, o, both factors, down
    assert once == 3 * 2 * (484 + num_adapted) * 3 / 4 / 2
    assert both - once == 3 * 4 * num_adapted * 3 / 4 / 2


def test_whole_copies_sum_gradients_once_for_each_optimizer_step() -> None:
    whole = RankSetup(num_ranks=4, is_bf16=True)
    assert estimate(whole) == StepTraffic(beside=((2 * 4 * 484 * 3 / 4 / 2, 2 / 3),))
    twice = estimate(whole, num_updates=2, num_micro_batches=6)
    assert twice == StepTraffic(beside=((2 * 2 * 4 * 484 * 3 / 4 / 2, 2 * 2 / 6),))


def test_tensor_ranks_gather_and_divide_activations_around_attention_and_mlp() -> None:
    found = estimate(MegatronSetup(num_ranks=4, tensor_parallel=2, is_bf16=True))
    layer_s = 4 * 2 * 24 * 4 / 2 / 8  # the 24 tokens of a copy, in bf16, within a node
    head_s = 3 * 2 * 40 / 2 / 8  # the output layer, for each micro-batch
    assert found.within_s == 3 * (2 * layer_s + head_s)
    assert found.after_s == 2 * (4 * 484 / 2) / 2 / 1  # of two copies, one on each node: a port of each rank
    assert found.beside == ()


def test_tensor_ranks_on_two_nodes_share_their_ports() -> None:
    one, two = (estimate(MegatronSetup(num_ranks=4, tensor_parallel=4), links=links) for links in (ONE_NODE, TWO_NODES))
    assert two.within_s == 4 * one.within_s


def test_stages_have_their_share_of_the_layers_and_one_has_the_head() -> None:
    found = estimate(MegatronSetup(num_ranks=4, tensor_parallel=2, pipeline_parallel=2, is_bf16=True))
    assert found.within_s == 3 * (4 * 2 * 48 * 4 / 2 / 8 + 3 * 2 * 40 / 2 / 8)
    assert found.after_s == 0, "there is one copy of each stage"


def test_tokens_go_to_their_experts_and_back_in_each_pass() -> None:
    found = estimate(MegatronSetup(num_ranks=4, expert_parallel=4, is_bf16=True), shape=EXPERTS)
    routed_bytes = 12 * 2 * 4 * 2  # the 12 tokens of a rank, to two experts each
    assert found.within_s == 3 * 2 * 2 * routed_bytes / 4 * 2 / 1, "half of them are sent to the other node"
    assert found.after_s == 2 * (4 * 324 * 3 / 4 / 2), "there is one copy of each expert"
    within = estimate(MegatronSetup(num_ranks=4, expert_parallel=4, is_bf16=True), shape=EXPERTS, links=ONE_NODE)
    assert within.within_s == 3 * 2 * 2 * routed_bytes / 4 * 3 / 8


def test_copies_of_experts_sum_their_gradients() -> None:
    found = estimate(MegatronSetup(num_ranks=4, expert_parallel=2), shape=EXPERTS)
    assert found.after_s == 2 * (4 * 324 * 3 / 4 / 2 + 4 * 288 / 2 / 2 / 1)


def test_layers_with_experts_gather_activations_for_attention_and_for_a_shared_expert() -> None:
    dense, routed, shared = (
        estimate(MegatronSetup(num_ranks=2, tensor_parallel=2), shape=shape)
        for shape in (DENSE, EXPERTS, msgspec.structs.replace(EXPERTS, shared_inner=2))
    )
    head_s = 3 * 3 * 4 * 40 / 2 / 8
    assert routed.within_s - head_s == (dense.within_s - head_s) / 2
    assert shared.within_s == dense.within_s


def test_context_ranks_swap_queries_keys_values_and_outputs() -> None:
    divided = msgspec.structs.replace(SHARDED, num_ranks=2, context_parallel=2)
    assert estimate(divided).within_s == 3 * 2 * 24 * (4 + 2) * 4 * 2 / 2 / 8
    of_four = estimate(msgspec.structs.replace(SHARDED, context_parallel=4), links=ONE_NODE)
    assert of_four.within_s == 3 * 2 * 12 * (4 + 4) * 4 * 2 / 4 * 3 / 8, "keys and values are repeated"
    whole = estimate(MegatronSetup(num_ranks=2, context_parallel=2, is_bf16=True))
    assert whole.within_s == estimate(divided).within_s
    across = estimate(MegatronSetup(num_ranks=4, tensor_parallel=2, context_parallel=2, is_bf16=True))
    tensor_s = estimate(MegatronSetup(num_ranks=4, tensor_parallel=2, is_bf16=True)).within_s
    assert across.within_s == tensor_s + 3 * 2 * 24 * (2 + 2) * 4 * 2 / 2 / 1, "members are on different nodes"


@pytest.mark.parametrize("setup", [RankSetup(is_bf16=True), MegatronSetup(is_bf16=True)], ids=["torch", "megatron"])
@pytest.mark.parametrize("shape", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_one_rank_sends_nothing(setup, shape) -> None:
    found = estimate(setup, shape=shape)
    assert (found.within_s, found.after_s, found.exposed_s(0.0)) == (0, 0, 0)


def test_links_of_unknown_bandwidth_within_a_node_are_not_counted() -> None:
    found = estimate(SHARDED, links=RankLinks(ranks_per_node=4, port=1.0))
    assert found.exposed_s(0.0) == 0
    assert estimate(SHARDED, links=RankLinks(ranks_per_node=2, port=1.0)).exposed_s(0.0) > 0


def test_what_exceeds_the_products_of_its_passes_is_exposed() -> None:
    traffic = StepTraffic(beside=((3.0, 1), (3.0, 1), (7.0, 2)))
    assert [traffic.exposed_s(pass_s) for pass_s in (0.0, 2.0, 3.25, 4.0)] == [13.0, 5.0, 0.5, 0.0]


QWEN3_30B = read_architecture(MODEL_CONFIGS["Qwen/Qwen3-30B-A3B"])
SETUPS = {
    "sharded": RankSetup(num_ranks=64, is_sharded=True, is_bf16=True),
    "context": RankSetup(num_ranks=64, is_sharded=True, is_bf16=True, context_parallel=16),
    "whole": RankSetup(num_ranks=64, is_bf16=True),
    "tensor": MegatronSetup(num_ranks=64, tensor_parallel=4, is_bf16=True),
    "experts": MegatronSetup(num_ranks=64, expert_parallel=16, is_bf16=True),
    "all": MegatronSetup(
        num_ranks=64, tensor_parallel=2, pipeline_parallel=4, expert_parallel=4, context_parallel=2, is_bf16=True
    ),
}


def estimate_real_s(setup, *, num_micro_batches: int = 4, port: float = 25e9, link: float = 450e9, per_node: int = 8):
    """Return the time of a step of Qwen3-30B-A3B on 64 H100."""
    batch = StepBatch(num_tokens=1e6, num_micro_batches=num_micro_batches)
    links = RankLinks(ranks_per_node=per_node, link=link, port=port)
    work = TrainingWork(
        num_tokens=1e6,
        mean_length=4000,
        num_gpus=64,
        num_micro_batches=num_micro_batches,
        traffic=estimate_traffic(QWEN3_30B, setup, batch=batch, links=links),
    )
    return estimate_step_s(GPU, shape=make_model_shape(QWEN3_30B), work=work)


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_slower_links_and_smaller_nodes_never_shorten_a_step(setup) -> None:
    ports = [estimate_real_s(setup, port=port) for port in (1e12, 50e9, 25e9, 12.5e9, 1e9)]
    links = [estimate_real_s(setup, link=link) for link in (1e13, 450e9, 32e9, 1e9)]
    nodes = [estimate_real_s(setup, per_node=num) for num in (64, 8, 4, 1)]
    for seconds in (ports, links, nodes):
        assert seconds == sorted(seconds)
        assert seconds[-1] > seconds[0]


def test_more_micro_batches_gather_the_weights_more_often() -> None:
    seconds = [estimate_real_s(SETUPS["sharded"], num_micro_batches=num) for num in (1, 2, 4, 8)]
    assert seconds == sorted(seconds)
    assert seconds[-1] > 2 * seconds[0]


def test_stages_wait_for_what_others_send_within_their_layers() -> None:
    shape = make_model_shape(QWEN3_30B)
    work = TrainingWork(num_tokens=1e6, mean_length=0, num_gpus=64, pp=3, num_micro_batches=4)
    plain_s = estimate_step_s(GPU, shape=shape, work=work)
    sending = replace(work, traffic=StepTraffic(within_s=10.0, after_s=1.0))
    assert estimate_step_s(GPU, shape=shape, work=sending) == pytest.approx(plain_s + 10 * (1 + 2 / 4) + 1)
