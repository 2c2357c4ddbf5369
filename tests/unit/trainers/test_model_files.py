"""A model read slice by slice: the values of transformers' own loading, and refusals that name file and tensor."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

from hpcrl.errors import TrainError
from hpcrl.models.weight_files import make_empty
from hpcrl.testing.ranks import run_ranks
from hpcrl.trainers.model_files import open_causal, open_critic
from hpcrl.trainers.token_model import TokenModel
from hpcrl.trainers.torch_model import _shard_module
from tests.unit.trainers.test_token_model import make_causal

CPU = torch.device("cpu")
FAMILIES = ("qwen3", "llama", "gemma2", "qwen3_moe", "mixtral")
INPUTS = torch.arange(12).view(2, 6)


def save_model(directory, family, **changed):
    make_causal(family, **changed).save_pretrained(directory, max_shard_size="6KB")
    return directory


def fill(source):
    source.fill(source.module, CPU)
    return source.module.eval()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_has_the_weights_buffers_and_logits_that_transformers_loads(tmp_path, family, tied):
    save_model(tmp_path, family, tie_word_embeddings=tied)
    source = open_causal(tmp_path)
    assert all(parameter.is_meta for parameter in source.module.parameters())
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    found = fill(source)
    for tensors in ("named_parameters", "named_buffers"):
        mine, theirs = dict(getattr(found, tensors)()), dict(getattr(expected, tensors)())
        assert mine.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert torch.equal(mine[name], tensor), name
    assert (found.lm_head.weight is found.model.embed_tokens.weight) == tied
    with torch.no_grad():
        assert torch.equal(found(INPUTS).logits, expected(INPUTS).logits)


def test_a_critic_has_the_body_and_a_head_of_zeros(tmp_path):
    save_model(tmp_path, "qwen3")
    critic = fill(open_critic(tmp_path))
    expected = AutoModelForTokenClassification.from_pretrained(tmp_path, num_labels=1, dtype=torch.float32)
    body = dict(expected.model.named_parameters())
    assert all(torch.equal(tensor, body[name]) for name, tensor in critic.model.named_parameters())
    assert not any(parameter.any() for parameter in critic.score.parameters())


def test_a_model_in_bf16_keeps_its_buffers_in_float32(tmp_path):
    save_model(tmp_path, "llama")
    source = open_causal(tmp_path, dtype=torch.bfloat16)
    model = fill(source)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


def change_file(directory, change):
    """Change the tensors of the file that has the final norm; return its path."""
    index = json.loads((directory / "model.safetensors.index.json").read_bytes())
    path = directory / index["weight_map"]["model.norm.weight"]
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    return path


def remove_index(directory):
    """Put all tensors into one file."""
    tensors = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(path)
        path.unlink()
    (directory / "model.safetensors.index.json").unlink()
    return tensors


def refuse(directory):
    with pytest.raises(TrainError) as caught:
        open_causal(directory)
    return str(caught.value)


def test_damaged_missing_and_foreign_tensors_are_refused_by_file_and_name(tmp_path):
    whole = save_model(tmp_path / "whole", "qwen3")

    def copy(name):
        return Path(shutil.copytree(whole, tmp_path / name))

    path = change_file(copy("lacking"), lambda tensors: tensors.pop("model.norm.weight"))
    assert re.search(rf"{path.name} has no tensor 'model.norm.weight'", refuse(path.parent))
    path = change_file(copy("more"), lambda tensors: tensors.update(odd=torch.zeros(2)))
    assert re.search(rf"{path.name} has the tensor 'odd', which a Qwen3ForCausalLM", refuse(path.parent))
    path = change_file(copy("wide"), lambda tensors: tensors.update({"model.norm.weight": torch.zeros(17)}))
    assert re.search(rf"{path.name}: 'model.norm.weight' has the shape \(17,\)", refuse(path.parent))
    path = next(copy("cut").glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-5])
    assert re.search(rf"{path.name} is missing or damaged", refuse(path.parent))
    path = next(copy("gone").glob("*.safetensors"))
    path.unlink()
    assert re.search(rf"{path.name} is missing or damaged", refuse(path.parent))


def test_untied_embeddings_without_a_head_and_quantised_weights_are_refused(tmp_path):
    save_model(tmp_path, "qwen3", tie_word_embeddings=True)
    tensors = remove_index(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    fill(open_causal(tmp_path))
    config = json.loads((tmp_path / "config.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    assert "has the tensor 'lm_head.weight'" in refuse(tmp_path)
    assert "is tie_word_embeddings in config.json as in the model's own?" in refuse(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    assert "holds quantised weights" in refuse(tmp_path)


def test_a_stored_head_must_equal_the_embeddings_it_is_tied_to(tmp_path):
    save_model(tmp_path, "qwen3", tie_word_embeddings=True)
    tensors = remove_index(tmp_path)
    path, embeddings = tmp_path / "model.safetensors", tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": embeddings.clone()}, path)
    fill(open_causal(tmp_path))
    save_file(tensors | {"lm_head.weight": embeddings + 1}, path)
    source = open_causal(tmp_path)
    with pytest.raises(TrainError, match=r"'lm_head\.weight' that differs from 'model\.embed_tokens\.weight'"):
        source.fill(source.module, torch.device("cpu"))


def test_heads_that_do_not_divide_the_hidden_size_are_refused_without_a_traceback(tmp_path):
    save_model(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_bytes()) | {"num_attention_heads": 3, "head_dim": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "cannot be loaded" in refuse(tmp_path)


def load_shards(world, directories):
    """Load each model over the ranks; return whether all weights are those of transformers, and the share held."""
    results = []
    for directory in directories:
        source = open_causal(Path(directory))
        called = TokenModel(source.module.eval())
        _shard_module(called, world=world, policy=MixedPrecisionPolicy())
        source.fill(called, world.device)
        expected = dict(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).named_parameters())
        found = dict(source.module.named_parameters())
        same = found.keys() == expected.keys() and all(
            isinstance(tensor, DTensor) and torch.equal(tensor.full_tensor(), expected[name])
            for name, tensor in found.items()
        )
        held = sum(tensor.to_local().numel() for tensor in found.values())
        results.append([same, held / sum(tensor.numel() for tensor in expected.values())])
    return results


@pytest.mark.timeout(900)
def test_two_ranks_read_their_halves_of_dense_models_and_experts(tmp_path):
    directories = [str(save_model(tmp_path / family, family)) for family in FAMILIES]
    directories.append(str(save_model(tmp_path / "tied", "llama", tie_word_embeddings=True)))
    for results in run_ranks(2, "tests.unit.trainers.test_model_files:load_shards", directories):
        for same, share in results:
            assert same
            assert share == pytest.approx(0.5, abs=0.02)


HIDDEN, NUM_LAYERS = 1024, 4


def measure_memory(world, directory):
    """Load a model and return the most anonymous memory that this took, over the bytes of this rank's share."""
    before = read_anonymous_bytes()
    source = open_causal(Path(directory))
    called = TokenModel(source.module.eval())
    _shard_module(called, world=world, policy=MixedPrecisionPolicy())
    source.fill(called, world.device)
    share = sum(parameter.to_local().nbytes for parameter in source.module.parameters())
    return [(read_anonymous_bytes(peak=True) - before) / share, share]


def read_anonymous_bytes(*, peak=False):
    """Read this process's anonymous memory from the kernel; files that are mapped do not count."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) * 1024


@pytest.mark.timeout(900)
def test_a_rank_holds_about_its_share_in_host_memory(tmp_path):
    config = AutoConfig.for_model(
        "llama",
        vocab_size=4096,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=64,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    for ratio, share in run_ranks(2, "tests.unit.trainers.test_model_files:measure_memory", str(tmp_path)):
        assert share > 70e6
        assert ratio < 1.3


def test_experts_that_no_node_could_hold_have_a_shape_and_no_memory():
    """One layer of them would have 4 TiB while the model is made."""
    sizes = {"hidden_size": 16384, "moe_intermediate_size": 8192, "num_experts": 4096, "num_hidden_layers": 1}
    module = make_empty(AutoConfig.for_model("qwen3_moe", **sizes), AutoModelForCausalLM, dtype=torch.bfloat16)
    experts = module.model.layers[0].mlp.experts.gate_up_proj
    assert (experts.shape, experts.device.type) == ((4096, 2 * 8192, 16384), "meta")
    assert module.model.rotary_emb.inv_freq.device.type == "cpu"
