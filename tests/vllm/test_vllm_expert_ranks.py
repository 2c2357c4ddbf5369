"""A mixture of experts on two ranks of a vLLM engine: each has a part of every expert, or whole experts."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.families import stack_experts
from tests.support.family_engines import assert_follows_trainer, make_served_model
from tests.support.trained import train_and_export


def make_listed(directory: Path) -> None:
    """Make a model whose files list the experts one by one."""
    make_served_model(directory, family="qwen3_moe")


def make_stacked(directory: Path) -> None:
    make_listed(directory)
    stack_experts(directory)


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "has_whole_experts", "make_model"),
    [
        ("tensor_parallel", False, make_listed),
        ("tensor_parallel", False, make_stacked),
        ("tensor_parallel", True, make_listed),
        ("tensor_parallel", True, make_stacked),
        ("data_parallel", False, make_stacked),
        ("data_parallel", True, make_listed),
    ],
)
def test_ranks_that_divide_experts_follow_the_trainer(
    ranks: str, has_whole_experts: bool, make_model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slice of an expert has 16 rows, to which vLLM adds 16 for its kernel."""
    from tests.support.served import place

    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    exported = train_and_export(tmp_path / "model", make_model=make_model)
    with place(tmp_path / "campaign", exported.exported) as there:
        plain = dataclasses.replace(there.launch("two"), kv_connector=None, kv_dir=None)
        launch = dataclasses.replace(plain, expert_parallel=has_whole_experts, **{ranks: 2})
        with there.engine(launch) as engine:
            assert_follows_trainer(engine, there, exported, num_requests=4)
        assert ("_EP1 pid=" in launch.log.read_text()) == has_whole_experts


@pytest.mark.parametrize("is_on_input", [False, True])
def test_a_rank_computes_its_own_experts_alone(is_on_input: bool) -> None:
    """What two ranks compute adds up to what one with all experts does."""
    import torch
    from vllm._custom_ops import cpu_prepack_moe_weight  # noqa: TID251
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation  # noqa: TID251

    from hpcrl.engines.vllm.cpu_experts import _apply_own_experts

    torch.manual_seed(0)
    num_chosen = 1 if is_on_input else 2
    inner, outer, states_TH = torch.randn(4, 64, 32), torch.randn(4, 32, 32), torch.randn(9, 32)
    weights_TK, ids_TK = torch.rand(9, num_chosen), torch.rand(9, 4).topk(num_chosen).indices.int()
    kernel = SimpleNamespace(_use_zentorch=False, w1_bias=None, w2_bias=None, isa="vec")

    def apply(experts: slice, expert_map: torch.Tensor | None) -> torch.Tensor:
        w1, w2 = (cpu_prepack_moe_weight(each[experts].contiguous(), "vec") for each in (inner, outer))
        output_TH = torch.empty(9, 32)
        tokens = {"hidden_states": states_TH.clone(), "topk_weights": weights_TK, "topk_ids": ids_TK}
        unused = dict.fromkeys(("a1q_scale", "a2_scale", "workspace13", "workspace2", "expert_tokens_meta"))
        _apply_own_experts(
            kernel,
            **{**tokens, **unused, "output": output_TH, "w1": w1, "w2": w2, "activation": MoEActivation.SILU},
            global_num_experts=4,
            expert_map=expert_map,
            apply_router_weight_on_input=is_on_input,
        )
        return output_TH

    first = apply(slice(0, 2), torch.tensor([0, 1, -1, -1], dtype=torch.int32))
    second = apply(slice(2, 4), torch.tensor([-1, -1, 0, 1], dtype=torch.int32))
    torch.testing.assert_close(first + second, apply(slice(0, 4), None))
    assert not torch.allclose(first, second)
