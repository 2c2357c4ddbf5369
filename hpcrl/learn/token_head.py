"""Log-probs and entropies of tokens from hidden states and the weight of the output layer, by chunks of tokens.

    compute_from_hidden   log-probs and entropies, without the logits of all tokens at once, forward or backward
    HeadForm              what a model does with the product of the two before it is its logits

The logits of 8,192 tokens of a vocabulary of 151,936 are 5 GB in float32, and a plain loss holds several copies. Here
the logits of a chunk are computed, used and dropped, and for the gradient computed once more: the head's product runs
three times in place of two, which is a few percent of a step. What is done between the products is compiled on GPUs:
step by step it would read and write the logits of a chunk in float32 a dozen times.

Legend: N model tokens of a micro-batch, H hidden size, V vocabulary, C tokens or vocabulary entries of a chunk
"""

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from hpcrl.hardware.train_memory import MAX_CHUNK_LOGITS
from hpcrl.learn.loss import gather_logprobs, logprobs_and_entropy

Result = TypeVar("Result")

_NOT_FUSED: set[Callable[..., Any]] = set()
"""The functions that torch could not compile on this machine."""


class HeadForm(NamedTuple):
    """The form of a model's logits: scale times product, then softly capped as Gemma's are."""

    scale: float = 1.0
    cap: float | None = None

    def apply(self, product_CV: Tensor) -> Tensor:
        """Return the logits."""
        logits_CV = product_CV if self.scale == 1.0 else product_CV * self.scale
        return logits_CV if self.cap is None else self.cap * torch.tanh(logits_CV / self.cap)


def compute_from_hidden(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    *,
    form: HeadForm,
    temperature: float,
    has_entropy_bonus: bool,
) -> tuple[Tensor, Tensor]:
    """Compute the log-prob of each target, and the entropy of its distribution, in float32.

    The product has the precision of autocast where that is on. Entropies have a gradient only for an entropy bonus.
    """
    device = hidden_NH.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_NH.dtype
    hidden_NH, weight_VH = hidden_NH.to(dtype), weight_VH.to(dtype)
    with torch.autocast(device, enabled=False):
        if hidden_NH.shape[0] * weight_VH.shape[0] <= MAX_CHUNK_LOGITS:
            logits_NV = form.apply((hidden_NH @ weight_VH.T).float())
            return logprobs_and_entropy(
                logits_NV, targets_N, temperature=temperature, has_entropy_bonus=has_entropy_bonus
            )
        logprobs_N, entropy_N = _ChunkedLogprobs.apply(hidden_NH, weight_VH, targets_N, form, temperature)  # type: ignore[no-untyped-call]
    return logprobs_N, entropy_N if has_entropy_bonus else entropy_N.detach()


class _ChunkedLogprobs(torch.autograd.Function):
    """A function that keeps two numbers of each token, and computes the logits of a chunk again for its gradient."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, form: HeadForm, temperature: float
    ) -> tuple[Tensor, Tensor]:
        num = len(hidden_NH)
        logprobs_N, entropy_N, log_sums_N = (hidden_NH.new_empty(num, dtype=torch.float32) for _ in range(3))
        for part in _list_chunks(num, other=len(weight_VH)):
            product_CV = hidden_NH[part] @ weight_VH.T
            logprobs_N[part], entropy_N[part], log_sums_N[part] = _run_fused(
                _reduce_product, product_CV, targets_N[part], form, temperature
            )
        ctx.form, ctx.temperature = form, temperature
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden_NH, weight_VH, targets_N, entropy_N, log_sums_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden_NH, weight_VH, targets_N, entropy_N, log_sums_N = ctx.saved_tensors
        of_logprobs_N, of_entropy_N = grads
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        # All tokens and a part of the vocabulary at a time: each row of the weight gets its gradient at once, and what
        # is added up, in float32, is the smaller of the two gradients.
        of_hidden_NH = torch.zeros_like(hidden_NH, dtype=torch.float32) if needs_hidden else None
        of_weight_VH = torch.empty_like(weight_VH) if needs_weight else None
        known_N = entropy_N, log_sums_N, of_logprobs_N, of_entropy_N
        for part in _list_chunks(len(weight_VH), other=len(hidden_NH)):
            product_NC = hidden_NH @ weight_VH[part].T
            grad_NC = _run_fused(
                _differentiate_product, product_NC, targets_N - part.start, *known_N, ctx.form, ctx.temperature
            )
            del product_NC
            if of_hidden_NH is not None:
                of_hidden_NH += grad_NC @ weight_VH[part]
            if of_weight_VH is not None:
                torch.mm(grad_NC.T, hidden_NH, out=of_weight_VH[part])
        return None if of_hidden_NH is None else of_hidden_NH.to(hidden_NH.dtype), of_weight_VH, None, None, None


def _list_chunks(length: int, *, other: int) -> list[slice]:
    """Divide a side of the logits so that a part of it, times the whole other side, is at most a chunk."""
    size = max(1, MAX_CHUNK_LOGITS // other)
    return [slice(start, start + size) for start in range(0, length, size)]


def _reduce_product(
    product_CV: Tensor, targets_C: Tensor, form: HeadForm, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute log-probs, entropies and sums of the softmax from a product, which is used up."""
    logits_CV = _compute_logits(product_CV, form, temperature)
    log_sums_C = logits_CV.logsumexp(-1)
    logits_CV -= log_sums_C.unsqueeze(-1)  # from here on log-probs
    return gather_logprobs(logits_CV, targets_C), -torch.linalg.vecdot(logits_CV.exp(), logits_CV), log_sums_C


def _differentiate_product(
    product_NC: Tensor,
    columns_N: Tensor,
    entropy_N: Tensor,
    log_sums_N: Tensor,
    of_logprobs_N: Tensor | None,
    of_entropy_N: Tensor | None,
    form: HeadForm,
    temperature: float,
) -> Tensor:
    """Compute the gradient of a product, which is used up; the columns of its targets may be outside."""
    logits_NC = _compute_logits(product_NC, form, temperature)
    slope_NC = _compute_slope(logits_NC, form, temperature)
    logits_NC -= log_sums_N.unsqueeze(-1)  # from here on log-probs
    grad_NC = logits_NC.exp()
    if of_entropy_N is None:
        grad_NC *= 0.0 if of_logprobs_N is None else -of_logprobs_N.unsqueeze(-1)
    else:
        logits_NC.add_(entropy_N.unsqueeze(-1)).mul_(-of_entropy_N.unsqueeze(-1))
        grad_NC *= logits_NC if of_logprobs_N is None else logits_NC.sub_(of_logprobs_N.unsqueeze(-1))
    if of_logprobs_N is not None:
        inside_N = (columns_N >= 0) & (columns_N < grad_NC.shape[1])
        columns_N = columns_N.clamp(0, grad_NC.shape[1] - 1)
        grad_NC.scatter_add_(-1, columns_N.unsqueeze(-1), (of_logprobs_N * inside_N).unsqueeze(-1))
    if not (isinstance(slope_NC, float) and slope_NC == 1.0):
        grad_NC *= slope_NC
    return grad_NC.to(product_NC.dtype)


def _run_fused(work: Callable[..., Result], *inputs: Any) -> Result:
    """Run elementwise work: on a GPU as a few kernels that torch compiles, elsewhere, or if it cannot, step by step."""
    if not inputs[0].is_cuda or work in _NOT_FUSED:
        return work(*inputs)
    try:
        return cast(Result, _compile(work)(*inputs))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as exc:
        _NOT_FUSED.add(work)
        warnings.warn(f"log-probs are slower, as torch cannot compile them here: {exc}", stacklevel=2)
        return work(*inputs)


@cache
def _compile(work: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(work, dynamic=True)


def _compute_logits(product_CV: Tensor, form: HeadForm, temperature: float) -> Tensor:
    """Compute logits at the sampling temperature, in the product itself if it is in float32."""
    logits_CV = product_CV.float()
    if form.scale != 1.0:
        logits_CV *= form.scale
    if form.cap is not None:
        logits_CV.div_(form.cap).tanh_().mul_(form.cap)
    return logits_CV if temperature == 1.0 else logits_CV.div_(temperature)


def _compute_slope(logits_CV: Tensor, form: HeadForm, temperature: float) -> Tensor | float:
    """Compute the derivative of these logits by the product."""
    if form.cap is None:
        return form.scale / temperature
    share_CV = logits_CV * (temperature / form.cap)
    return share_CV.square_().neg_().add_(1.0).mul_(form.scale / temperature)
