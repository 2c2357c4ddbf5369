"""A twin gets weights while its model is in use, swaps them in, and releases the old ones."""

import threading
from collections.abc import Iterable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from hpcrl.engines.vllm.weight_twin import ModelTwin

CONFIG = SimpleNamespace(dtype=torch.float32)


class Tied(torch.nn.Module):
    """A model with tied embeddings, as small language models have, and an attribute that is set after loading."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(8, 4)
        self.middle = torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(4.0))
        self.requires_grad_(False)
        self.scale: Any = torch.ones(1)

    def forward(self, ids: torch.Tensor) -> Any:
        return self.head(self.middle(self.embed(ids)) + self.table) * self.scale

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        own = dict(self.named_parameters())
        for name, tensor in weights:
            own[name].weight_loader(own[name], tensor)
        self.scale = torch.full((1,), 2.0)


@pytest.fixture
def model() -> Tied:
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading  # noqa: TID251

    torch.manual_seed(0)
    made = Tied().eval()
    record_metadata_for_reloading(made)
    return made


def weights(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = {"embed.weight": (8, 4), "middle.weight": (4, 4), "middle.bias": (4,)}
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def expected(tensors: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    middle = tensors["embed.weight"][ids] @ tensors["middle.weight"].T + tensors["middle.bias"] + torch.arange(4.0)
    return middle @ tensors["embed.weight"].T * 2


def filled(model: Tied, tensors: dict[str, torch.Tensor]) -> "ModelTwin":
    from hpcrl.engines.vllm.weight_twin import ModelTwin

    twin = ModelTwin(model)
    twin.fill(tensors.items(), model_config=CONFIG)
    return twin


def test_the_model_does_not_change_while_its_twin_is_filled(model: Tied) -> None:
    ids = torch.arange(8)
    before = model(ids)
    filled(model, weights(1))
    assert torch.equal(model(ids), before)


@pytest.mark.parametrize("num_versions", [1, 2, 3])
def test_after_the_change_the_model_computes_with_the_new_weights(model: Tied, num_versions: int) -> None:
    ids = torch.arange(8)
    for version in range(num_versions):
        twin = filled(model, weights(version))
        twin.take_over()
        twin.release_memory()
        assert torch.allclose(model(ids), expected(weights(version), ids), atol=1e-5)
    assert model.head.weight is model.embed.weight


def test_the_old_weights_are_kept_until_they_are_released(model: Tied) -> None:
    old = model.middle.weight.data_ptr()
    twin = filled(model, weights(1))
    twin.take_over()
    held = {tensor.data_ptr() for _, tensor in twin._replaced_tensors()}
    assert old in held
    twin.release_memory()
    assert all(tensor.numel() == 0 for _, tensor in twin._replaced_tensors())
    assert model.middle.weight.numel() == 16


def test_the_next_version_does_not_wait_for_a_delay_of_the_one_before() -> None:
    from hpcrl.engines.vllm.weight_plugin import UpdateThreads

    done: list[str] = []
    is_prepared, work = threading.Event(), UpdateThreads()
    work.run(lambda: done.append("first"))
    work.run(lambda: done.append("release"), delay_s=threading.TIMEOUT_MAX)
    work.run(lambda: done.append("next"))
    work.run(is_prepared.set)
    assert is_prepared.wait(60.0)
    assert done == ["first", "release", "next"]


class PaddedExperts(torch.nn.Module):
    """A layer whose kernel needs four rows, as vLLM's for experts on CPUs needs 32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3, 2), requires_grad=False)
        self.quant_method = SimpleNamespace(moe_kernel=SimpleNamespace(fused_experts=self))

    @staticmethod
    def process_weights_after_loading(layer: torch.nn.Module) -> None:
        layer.weight = torch.nn.Parameter(torch.cat([layer.weight, torch.zeros(1, 2)]), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            own = getattr(self, name)
            own.weight_loader(own, tensor)


@pytest.mark.parametrize("num_versions", [1, 2])
def test_rows_that_packing_adds_are_in_no_version(num_versions: int) -> None:
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading  # noqa: TID251

    from hpcrl.engines.vllm.weight_twin import ModelTwin

    layer = PaddedExperts()
    record_metadata_for_reloading(layer)
    layer.process_weights_after_loading(layer)
    for version in range(1, num_versions + 1):
        twin = ModelTwin(layer)
        twin.fill([("weight", torch.full((3, 2), float(version)))], model_config=CONFIG)
        twin.take_over()
        assert layer.weight.tolist() == [[version, version]] * 3 + [[0, 0]]
