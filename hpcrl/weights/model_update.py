"""Weights of a version against a model: every name, shape and type is checked before one byte is copied."""

import torch

from hpcrl.errors import WeightsError


def collect_parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What a version of this model holds: its parameters by name, one that is used twice (tied) once."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def copy_weights(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Give the model these weights, all of them; on WeightsError it keeps the old ones."""
    parameters = collect_parameters(model)
    check_fit(tensors, parameters)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])


def borrow_weights(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> "BorrowedWeights":
    """Let the model use these weights, all of them, where they lie; on WeightsError it keeps the old ones.

    Where it cannot, since it is on a GPU and they are not, they are copied at once.
    """
    parameters = collect_parameters(model)
    check_fit(tensors, parameters)
    devices = {parameter.device for parameter in parameters.values()}
    if devices != {tensor.device for tensor in tensors.values()}:
        copy_weights(model, tensors)
        return BorrowedWeights({}, {})
    own = {name: parameter.data for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.data = tensors[name]
    return BorrowedWeights(dict(model.named_parameters()), own)


class BorrowedWeights:
    """Weights that a model uses where they lie, and its own memory, which waits for them."""

    def __init__(self, parameters: dict[str, torch.nn.Parameter], own_tensors: dict[str, torch.Tensor]) -> None:
        self._parameters, self._own_tensors = parameters, own_tensors

    def copy(self) -> None:
        """Copy them to where they belong, while the model is in use."""
        with torch.no_grad():
            for name, tensor in self._own_tensors.items():
                tensor.copy_(self._parameters[name])

    def end(self) -> None:
        """Let the model use its own memory again."""
        for name, tensor in self._own_tensors.items():
            self._parameters[name].data = tensor


def check_fit(tensors: dict[str, torch.Tensor], parameters: dict[str, torch.Tensor]) -> None:
    """WeightsError, naming the tensor, unless `tensors` are exactly what `parameters` want."""
    if missing := sorted(parameters.keys() - tensors.keys()):
        raise WeightsError(f"weights lack {_format_names(missing)}: publish every parameter of the model")
    if extra := sorted(tensors.keys() - parameters.keys()):
        raise WeightsError(f"weights hold {_format_names(extra)}, which the model does not have: is it the same model?")
    for name, wanted in parameters.items():
        if (got := tensors[name]).shape != wanted.shape:
            raise WeightsError(
                f"tensor {name!r} has shape {tuple(got.shape)}, the model wants {tuple(wanted.shape)}: "
                "is it the same model?"
            )
        if got.dtype != wanted.dtype:
            raise WeightsError(f"tensor {name!r} is {got.dtype}, the model wants {wanted.dtype}: publish in that type")


def _format_names(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return "tensor " + ", ".join(repr(name) for name in names[:3]) + more
