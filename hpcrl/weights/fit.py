"""Weights of a version against a model: every name, shape and type is checked before one byte is copied."""

import torch

from hpcrl.errors import WeightsError


def parameters_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What a version of this model holds: its parameters by name, one that is used twice (tied) once."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def copy_into(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Give the model these weights, all of them; on WeightsError it keeps the old ones."""
    parameters = parameters_of(model)
    check_fit(tensors, parameters)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])


def check_fit(tensors: dict[str, torch.Tensor], parameters: dict[str, torch.Tensor]) -> None:
    """WeightsError, naming the tensor, unless `tensors` are exactly what `parameters` want."""
    if missing := sorted(parameters.keys() - tensors.keys()):
        raise WeightsError(f"weights lack {_some(missing)}: publish every parameter of the model")
    if extra := sorted(tensors.keys() - parameters.keys()):
        raise WeightsError(f"weights hold {_some(extra)}, which the model does not have: is it the same model?")
    for name, wanted in parameters.items():
        if (got := tensors[name]).shape != wanted.shape:
            raise WeightsError(
                f"tensor {name!r} has shape {tuple(got.shape)}, the model wants {tuple(wanted.shape)}: "
                "is it the same model?"
            )
        if got.dtype != wanted.dtype:
            raise WeightsError(f"tensor {name!r} is {got.dtype}, the model wants {wanted.dtype}: publish in that type")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return "tensor " + ", ".join(repr(name) for name in names[:3]) + more
