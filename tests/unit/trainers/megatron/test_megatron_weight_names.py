"""The map from shards of canonical tensors to the tensors of a Megatron rank."""

import itertools
import math
from typing import NamedTuple

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hpcrl.errors import TrainError
from hpcrl.hardware.degrees import ParallelDegrees
from hpcrl.trainers.megatron.weight_names import (
    ParallelRank,
    check_parallelism,
    map_shards,
    pad_vocab_size,
    read_model_dims,
)
from hpcrl.weights.layout import TensorLayout, TensorShard, check_cover
from hpcrl.weights.stored_tensors import list_model_tensors
from tests.support.architectures import FAMILIES, SIZES


class Degrees(NamedTuple):
    """The ranks of each kind of parallelism, and the copies of the whole model."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    copies: int = 1
    cp: int = 1
    chunks: int = 1

    def list_ranks(self):
        """List the ranks in megatron-core's order; the ranks of an expert's group may be of one copy or of several."""
        per_stage = self.tp * self.copies
        for pp, rank in itertools.product(range(self.pp), range(per_stage)):
            yield ParallelRank(
                **{"tp": rank % self.tp, "num_tp": self.tp, "pp": pp, "num_pp": self.pp},
                **{"ep": rank % self.ep, "num_ep": self.ep, "num_chunks": self.chunks},
                **{"copy": rank // self.tp, "expert_copy": rank // self.ep},
            )


def config(family, **changed):
    """Return the config of four layers with its fields, as transformers writes them."""
    sizes = {"num_hidden_layers": 4, "vocab_size": 31}
    return AutoConfig.for_model(FAMILIES[family].family, **SIZES | FAMILIES[family].fields | sizes | changed)


def dims_of(family, **changed):
    return read_model_dims(config(family, **changed).to_dict())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_names_and_shapes_are_those_of_the_model_of_transformers(family):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config(family))
    expected = {name: tuple(tensor.shape) for name, tensor in list_model_tensors(model).items()}
    found = {mapping.name: mapping.whole_shape for mapping in map_shards(dims_of(family), ParallelRank())}
    assert found == expected


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "degrees",
    [
        *(Degrees(), Degrees(tp=2), Degrees(pp=4), Degrees(ep=2, copies=2)),
        *(Degrees(2, 2, 4, 2), Degrees(tp=2, copies=2), Degrees(pp=2, chunks=2), Degrees(pp=3)),
    ],
    ids=str,
)
def test_every_value_is_provided_by_exactly_one_rank(family, degrees):
    dims = dims_of(family)
    if not FAMILIES[family].has_experts:
        degrees = degrees._replace(ep=1)
    layout = TensorLayout.pack(
        sorted({(mapping.name, "float32", mapping.whole_shape) for mapping in map_shards(dims, ParallelRank())})
    )
    given = [
        [
            TensorShard(name=mapping.name, start=mapping.start, shape=mapping.shape)
            for mapping in map_shards(dims, rank)
            if mapping.is_owner and not (rank.expert_copy if ".local_experts." in mapping.megatron_name else rank.copy)
        ]
        for rank in degrees.list_ranks()
    ]
    check_cover(layout, given)


@pytest.mark.parametrize("num_chunks", [1, 2])
@pytest.mark.parametrize("num_tp", [1, 2])
@pytest.mark.parametrize("family", ["qwen2", "deepseek_v3"])
def test_the_shards_of_a_rank_fill_its_tensors_without_overlap(family, num_tp, num_chunks):
    rows: dict[str, list[int]] = {}
    stages = {"pp": 1, "num_pp": 2, "num_chunks": num_chunks} if num_chunks > 1 else {}
    for mapping in map_shards(dims_of(family), ParallelRank(tp=num_tp - 1, num_tp=num_tp, **stages)):
        rows.setdefault(mapping.megatron_name, []).extend(range(mapping.rows.start, mapping.rows.stop))
        assert math.prod(mapping.shape) % (mapping.rows.stop - mapping.rows.start) == 0
        assert math.prod(mapping.shape) <= math.prod(mapping.whole_shape)
    for own, held in rows.items():
        assert sorted(held) == list(range(len(held))), own


def test_the_vocabulary_is_padded_so_that_every_rank_has_the_same_number_of_rows():
    assert pad_vocab_size(dims_of("qwen2"), num_tp=4) == 32


@pytest.mark.parametrize(
    ("family", "degrees", "message"),
    [
        ("qwen2", Degrees(tp=3), "does not divide the model's 2 query groups"),
        ("deepseek_v3", Degrees(tp=3), "does not divide the model's 4 attention heads"),
        ("qwen2", Degrees(pp=5), "more stages than the model's 4 layers"),
        ("mixtral", Degrees(ep=3), r"train\.expert_parallel = 3 does not divide the model's 4 experts"),
        ("qwen2", Degrees(ep=2), "the model has no experts: set it to 1"),
        ("qwen2", Degrees(chunks=2), "needs stages: set train.pipeline_parallel = 2 or more"),
        ("qwen2", Degrees(pp=2, chunks=4), "4 on each of 2 stages are more parts than the model's 4 layers"),
        ("qwen2", Degrees(cp=3), r"train\.context_parallel = 3 does not divide the 4 attention heads of the model"),
        ("qwen2", Degrees(tp=2, cp=4), r"the 2 attention heads of a rank with train\.tensor_parallel = 2"),
    ],
)
def test_a_parallelism_that_does_not_divide_the_model_is_refused(family, degrees, message):
    given = ParallelDegrees(tensor=degrees.tp, pipeline=degrees.pp, expert=degrees.ep, context=degrees.cp)
    with pytest.raises(TrainError, match=message):
        check_parallelism(dims_of(family), given, num_chunks=degrees.chunks)


@pytest.mark.parametrize(
    ("family", "changed", "message"),
    [
        ("llama3", {"model_type": "gpt2"}, "supports llama, .*, and this one is 'gpt2'"),
        ("llama3", {"rope_parameters": {"rope_type": "longrope"}}, "RoPE of type 'longrope'"),
        ("llama3", {"attention_bias": True}, "biases of other layers"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8}, r"sliding_window = 8"),
        ("glm4_moe", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("glm4_moe", {"norm_topk_prob": False}, "norm_topk_prob = false"),
        ("glm4_moe", {"num_experts_per_tok": 1}, "num_experts_per_tok = 1"),
        ("mixtral", {"num_experts_per_tok": 1}, "num_experts_per_tok = 1"),
        ("qwen3_moe", {"num_experts_per_tok": 1}, "num_experts_per_tok = 1"),
        ("deepseek_v3", {"topk_group": 1}, "num_experts_per_tok = 4 with topk_group = 1"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave = false"),
    ],
)
def test_a_model_that_would_be_computed_differently_is_refused(family, changed, message):
    fields = config(family).to_dict() | changed
    with pytest.raises(TrainError, match=message + '.*use trainer = "torch"'):
        read_model_dims(fields)


def test_a_single_expert_whose_weight_is_its_score_is_supported():
    assert dims_of("qwen3_moe", num_experts_per_tok=1, norm_topk_prob=False).shape.experts_per_token == 1
