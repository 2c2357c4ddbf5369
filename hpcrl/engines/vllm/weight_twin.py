"""A twin of a vLLM model: new weights are loaded and packed into it while the model is in use, then swapped in.

    ModelTwin               layers that share everything but weights with those of the model
    ModelTwin.fill          load a version into it with vLLM's loaders; slow
    ModelTwin.take_over     swap the weights of the model and the twin; fast
    ModelTwin.release_memory  release the old weights, little by little
    OWN_ATTRIBUTES, WRAPPED_LOADER_NAME, RELEASE_INTERVAL_S  constants

It is used for models on CPUs: there is memory for two copies of the weights, and packing them for the processor's
kernels, which vLLM does after loading, takes longer than anything else in an update.
"""

import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

OWN_ATTRIBUTES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
"""Attributes of a module that are not shared with its twin."""
WRAPPED_LOADER_NAME = "online_process_loader"
"""vLLM's name of the loaders that it wraps around those of a layer during a reload."""
RELEASE_INTERVAL_S = 0.002
"""The interval between releases of memory: during a release no other thread of the process can run Python."""


class _LayerPair(NamedTuple):
    layer: torch.nn.Module
    twin: torch.nn.Module
    shared: dict[str, Any]
    """The attributes of both when the twin was made."""


class ModelTwin:
    """A copy of a model that is used once: it holds a whole version between `fill` and `take_over`."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._pairs: dict[torch.nn.Module, _LayerPair] = {}
        self._tensors: dict[torch.Tensor, torch.Tensor] = {}
        self._model: Any = self._make_twin(model)

    def fill(self, tensors: Iterable[tuple[str, torch.Tensor]], *, model_config: Any) -> None:
        """Load all weights, under the trainer's names; the model does not change."""
        initialize_layerwise_reload(self._model)
        self._model.load_weights(iter(tensors))
        finalize_layerwise_reload(self._model, model_config)
        for layer in self._model.modules():
            kernel = _find_expert_kernel(layer)
            if kernel is not None:  # vLLM packs experts for the processor only when it loads them for the first time
                kernel.fused_experts.process_weights_after_loading(layer)

    def take_over(self) -> None:
        """Make the model use the loaded weights; call it between two steps."""
        for tensor, loaded in self._replaced_tensors():
            tensor.data, loaded.data = loaded.data, tensor.data
        for layer, twin, shared in self._pairs.values():
            for name, value in list(vars(twin).items()):  # packed weights among them
                if name not in OWN_ATTRIBUTES and value is not shared.get(name):
                    twin.__dict__[name] = shared.get(name)
                    layer.__dict__[name] = value

    def release_memory(self) -> None:
        """Release the old weights after `take_over`; to do it at once would take as long as a step or two."""
        for _, loaded in self._replaced_tensors():
            loaded.data = loaded.data.new_empty(0)
            time.sleep(RELEASE_INTERVAL_S)
        for _, twin, shared in self._pairs.values():
            for name, value in list(vars(twin).items()):
                if name not in OWN_ATTRIBUTES and value is shared.get(name):
                    del twin.__dict__[name]
            shared.clear()
            time.sleep(RELEASE_INTERVAL_S)

    def _replaced_tensors(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each tensor of the model with the one loaded for it, once."""
        seen: set[tuple[int, int]] = set()
        for layer, twin, _ in self._pairs.values():
            for own_tensors, twin_tensors in ((layer._parameters, twin._parameters), (layer._buffers, twin._buffers)):
                for name, tensor in own_tensors.items():
                    loaded = twin_tensors.get(name)
                    if tensor is None or loaded is None or (id(tensor), id(loaded)) in seen:
                        continue
                    seen.add((id(tensor), id(loaded)))
                    yield tensor, loaded

    def _make_twin(self, layer: torch.nn.Module) -> torch.nn.Module:
        """Copy a module and all below it; a module that appears twice in the model does so in its twin."""
        if layer in self._pairs:
            return self._pairs[layer].twin
        twin: torch.nn.Module = type(layer).__new__(type(layer))
        shared = dict(vars(layer))
        self._pairs[layer] = _LayerPair(layer, twin, shared)
        twin.__dict__.update(shared)
        twin.__dict__["_non_persistent_buffers_set"] = set(layer._non_persistent_buffers_set)
        for kind in ("_parameters", "_buffers"):
            own = vars(layer)[kind]
            twin.__dict__[kind] = {
                name: None if held is None else self._copy_tensor(held) for name, held in own.items()
            }
        below = layer._modules.items()
        twin.__dict__["_modules"] = {name: None if part is None else self._make_twin(part) for name, part in below}
        self._describe(layer, twin)
        return twin

    def _describe(self, layer: torch.nn.Module, twin: torch.nn.Module) -> None:
        """Give vLLM's loaders the unpacked shapes of the twin, which are those of the layer."""
        info, known = get_layerwise_info(twin), get_layerwise_info(layer)
        info.restore_device = known.restore_device
        params, buffers = known.restore_metadata
        info.restore_metadata = (
            {name: _make_outline(tensor) for name, tensor in params.items()},
            {name: _make_outline(tensor) for name, tensor in buffers.items()},
        )
        if _find_expert_kernel(layer) is not None:  # packing may add rows, which no version has
            for name, tensor in params.items():
                parameter = twin._parameters[name]
                assert parameter is not None
                parameter.data = parameter.new_empty(tensor.shape)

    def _copy_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor not in self._tensors:
            self._tensors[tensor] = _wrap_like(tensor, tensor.data.clone())
        return self._tensors[tensor]


def _find_expert_kernel(layer: torch.nn.Module) -> Any:
    """Return the kernel of a layer of experts; None of another layer."""
    return getattr(getattr(layer, "quant_method", None), "moe_kernel", None)


def _wrap_like(tensor: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """Return `data` with the type of `tensor` and the attributes that vLLM's loaders have set on it."""
    made = data.detach()
    made.__class__ = type(tensor)
    made.__dict__ = dict(vars(tensor))
    return made


def _make_outline(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without memory, and with its original loader even if the model was reloaded before."""
    outline = _wrap_like(tensor, tensor.data)
    made: Any = outline
    while getattr(getattr(made, "weight_loader", None), "__name__", "") == WRAPPED_LOADER_NAME:
        made.weight_loader = made.weight_loader.__wrapped__
    return outline
