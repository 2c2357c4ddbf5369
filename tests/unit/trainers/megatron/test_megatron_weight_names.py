"""The map from shards of canonical tensors to the tensors of a Megatron rank."""

import math

import pytest
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from hpcrl.errors import TrainError
from hpcrl.trainers.megatron.weight_names import (
    ParallelRank,
    check_parallelism,
    map_shards,
    pad_vocab_size,
    read_model_dims,
)
from hpcrl.weights.layout import TensorLayout, TensorShard, check_cover

SIZES = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 4,
}


def config(kind, **changed):
    return kind(**{**SIZES, **changed})


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen2Config, Qwen3Config])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("num_tp", "num_pp"), [(1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (2, 2), (4, 4)])
def test_every_value_is_provided_by_exactly_one_rank(kind, tied, num_tp, num_pp):
    dims = read_model_dims(config(kind, tie_word_embeddings=tied))
    layout = TensorLayout.pack(
        sorted({(mapping.name, "float32", mapping.whole_shape) for mapping in map_shards(dims, ParallelRank())})
    )
    ranks = [ParallelRank(tp=tp, num_tp=num_tp, pp=pp, num_pp=num_pp) for tp in range(num_tp) for pp in range(num_pp)]
    given = [
        [
            TensorShard(name=mapping.name, start=mapping.start, shape=mapping.shape)
            for mapping in map_shards(dims, rank)
            if mapping.is_owner
        ]
        for rank in ranks
    ]
    check_cover(layout, given)


@pytest.mark.parametrize("num_tp", [1, 2, 4])
def test_the_shards_of_a_rank_fill_its_tensors_without_overlap(num_tp):
    dims = read_model_dims(config(Qwen2Config))
    rows: dict[str, list[int]] = {}
    for mapping in map_shards(dims, ParallelRank(tp=num_tp - 1, num_tp=num_tp)):
        rows.setdefault(mapping.megatron_name, []).extend(range(mapping.rows.start, mapping.rows.stop))
        assert mapping.rows.stop - mapping.rows.start == mapping.shape[0]
        assert math.prod(mapping.shape) <= math.prod(mapping.whole_shape)
    for own, held in rows.items():
        assert sorted(held) == list(range(len(held))), own


def test_the_vocabulary_is_padded_so_that_every_rank_has_the_same_number_of_rows():
    dims = read_model_dims(config(Qwen2Config))
    assert pad_vocab_size(dims, num_tp=4) == 32


@pytest.mark.parametrize(
    ("num_tp", "num_pp", "message"),
    [(3, 1, "does not divide the model's 4 query groups"), (8, 1, "query groups"), (1, 3, "4 layers")],
)
def test_a_parallelism_that_does_not_divide_the_model_is_refused(num_tp, num_pp, message):
    with pytest.raises(TrainError, match=message):
        check_parallelism(read_model_dims(config(Qwen2Config)), num_tp=num_tp, num_pp=num_pp)


def test_a_model_without_a_mapping_is_refused():
    strange = config(LlamaConfig)
    strange.model_type = "gpt2"
    with pytest.raises(TrainError, match="supports llama, qwen2, qwen3, mistral models, and this one is 'gpt2'"):
        read_model_dims(strange)
