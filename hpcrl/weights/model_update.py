"""Update a model with the weights of a version; names, shapes and types are checked before a byte is copied.

collect_parameters               a model's tensors, as a version holds them
copy_weights                     copy a version into a model
borrow_weights, BorrowedWeights  let a model use a version where it is stored, and copy it later
check_fit                        compare a version with a model
"""

from collections.abc import Mapping

import torch

from hpcrl.errors import WeightsError
from hpcrl.weights.layout import ROUNDED_DTYPES
from hpcrl.weights.stored_tensors import StoredTensors, list_model_tensors, split_tensors


def collect_parameters(model: torch.nn.Module, stored: StoredTensors | None = None) -> dict[str, torch.Tensor]:
    """Return the tensors that a version of this model holds, in the model's memory; a tied one once.

    Their names are those in the files of the model, as far as `stored` has them; else the model's own.
    """
    return split_tensors(list_model_tensors(model), stored or {})


def copy_weights(
    model: torch.nn.Module, tensors: Mapping[str, torch.Tensor], stored: StoredTensors | None = None
) -> None:
    """Copy all of these weights into the model; on WeightsError it keeps the old ones."""
    parameters = collect_parameters(model, stored)
    check_fit(tensors, parameters)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])


def borrow_weights(
    model: torch.nn.Module, tensors: Mapping[str, torch.Tensor], stored: StoredTensors | None = None
) -> "BorrowedWeights":
    """Let the model use all of these weights without a copy; on WeightsError it keeps the old ones.

    If model and weights are on different devices, of different types, or under different names, as experts that the
    model has in one tensor, the weights are copied at once instead.
    """
    parameters = collect_parameters(model, stored)
    check_fit(tensors, parameters)
    own = list_model_tensors(model)
    if own.keys() != tensors.keys() or any(
        _get_kind(parameter) != _get_kind(tensors[name]) for name, parameter in parameters.items()
    ):
        copy_weights(model, tensors, stored)
        return BorrowedWeights({}, {})
    own = {name: tensor.data for name, tensor in own.items()}
    borrowing = {name: tensor for name, tensor in [*model.named_parameters(), *model.named_buffers()] if name in own}
    for name, tensor in borrowing.items():
        tensor.data = tensors[name]
    return BorrowedWeights(borrowing, own)


class BorrowedWeights:
    """Weights that a model uses in place, and the model's own memory, which they are copied to later."""

    def __init__(self, parameters: dict[str, torch.Tensor], own_tensors: dict[str, torch.Tensor]) -> None:
        self._parameters, self._own_tensors = parameters, own_tensors

    def copy(self) -> None:
        """Copy the weights to the model's own memory while the model is in use."""
        with torch.no_grad():
            for name, tensor in self._own_tensors.items():
                tensor.copy_(self._parameters[name])

    def end(self) -> None:
        """Let the model use its own memory again."""
        for name, tensor in self._own_tensors.items():
            self._parameters[name].data = tensor


def check_fit(tensors: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]) -> None:
    """Raise WeightsError, naming the tensor, unless `tensors` match `parameters`, or convert to them without a loss."""
    if missing := sorted(parameters.keys() - tensors.keys()):
        raise WeightsError(f"weights lack {_format_names(missing)}: publish every parameter of the model")
    if extra := sorted(tensors.keys() - parameters.keys()):
        raise WeightsError(f"weights hold {_format_names(extra)}, which the model does not have: is it the same model?")
    for name, wanted in parameters.items():
        if (got := tensors[name]).shape != wanted.shape:
            raise WeightsError(
                f"tensor {name!r} has shape {tuple(got.shape)}, the model needs {tuple(wanted.shape)}: "
                "is it the same model?"
            )
        is_rounded = wanted.dtype == torch.float32 and str(got.dtype).removeprefix("torch.") in ROUNDED_DTYPES
        if got.dtype != wanted.dtype and not is_rounded:
            raise WeightsError(f"tensor {name!r} is {got.dtype}, the model needs {wanted.dtype}: publish in that type")


def _get_kind(tensor: torch.Tensor) -> tuple[torch.device, torch.dtype]:
    return tensor.device, tensor.dtype


def _format_names(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return "tensor " + ", ".join(repr(name) for name in names[:3]) + more
