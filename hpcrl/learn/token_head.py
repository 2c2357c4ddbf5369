"""Log-probs and entropies of tokens from hidden states and the weight of the output layer, by chunks of tokens.

    compute_from_hidden   log-probs and entropies, without the logits of all tokens at once, forward or backward
    HeadForm              what a model does with the product of the two before it is its logits
    MAX_CHUNK_LOGITS      the most logits that exist at once

The logits of 8,192 tokens of a vocabulary of 151,936 are 5 GB in float32, and a plain loss holds several copies. Here
the logits of a chunk are computed, used and dropped, and for the gradient computed once more: the head's product runs
three times in place of two, which is a few percent of a step.

Legend: N model tokens of a micro-batch, C tokens of a chunk, H hidden size, V vocabulary
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpcrl.learn.loss import gather_logprobs, logprobs_and_entropy

MAX_CHUNK_LOGITS = 1 << 26
"""256 MiB in float32, 441 tokens of a vocabulary of 151,936: enough to keep a GPU's matrix units busy."""


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
        for part in _list_chunks(hidden_NH, weight_VH):
            logits_CV = _compute_logits(hidden_NH[part], weight_VH, form, temperature)
            log_sums_N[part] = logits_CV.logsumexp(-1)
            logits_CV -= log_sums_N[part].unsqueeze(-1)  # from here on log-probs
            logprobs_N[part] = gather_logprobs(logits_CV, targets_N[part])
            entropy_N[part] = -torch.linalg.vecdot(logits_CV.exp(), logits_CV)
        ctx.form, ctx.temperature = form, temperature
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden_NH, weight_VH, targets_N, entropy_N, log_sums_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden_NH, weight_VH, targets_N, entropy_N, log_sums_N = ctx.saved_tensors
        of_logprobs_N, of_entropy_N = grads
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        of_hidden_NH = torch.empty_like(hidden_NH) if needs_hidden else None
        # Chunks are added up in float32: in bfloat16 the sum of many would lose the small ones.
        of_weight_VH = torch.zeros_like(weight_VH, dtype=torch.float32) if needs_weight else None
        for part in _list_chunks(hidden_NH, weight_VH):
            logits_CV = _compute_logits(hidden_NH[part], weight_VH, ctx.form, ctx.temperature)
            slope_CV = _compute_slope(logits_CV, ctx.form, ctx.temperature)
            logits_CV -= log_sums_N[part].unsqueeze(-1)
            grad_CV = logits_CV.exp()
            if of_entropy_N is None:
                grad_CV *= 0.0 if of_logprobs_N is None else -of_logprobs_N[part].unsqueeze(-1)
            else:
                factor_CV = (logits_CV + entropy_N[part].unsqueeze(-1)).mul_(-of_entropy_N[part].unsqueeze(-1))
                grad_CV *= factor_CV if of_logprobs_N is None else factor_CV.sub_(of_logprobs_N[part].unsqueeze(-1))
            if of_logprobs_N is not None:
                grad_CV.scatter_add_(-1, targets_N[part].unsqueeze(-1), of_logprobs_N[part].unsqueeze(-1))
            grad_CV = grad_CV.mul_(slope_CV).to(hidden_NH.dtype)
            if of_hidden_NH is not None:
                of_hidden_NH[part] = grad_CV @ weight_VH
            if of_weight_VH is not None:
                of_weight_VH += grad_CV.T @ hidden_NH[part]
        return of_hidden_NH, None if of_weight_VH is None else of_weight_VH.to(weight_VH.dtype), None, None, None


def _list_chunks(hidden_NH: Tensor, weight_VH: Tensor) -> list[slice]:
    size = max(1, MAX_CHUNK_LOGITS // weight_VH.shape[0])
    return [slice(start, start + size) for start in range(0, hidden_NH.shape[0], size)]


def _compute_logits(hidden_CH: Tensor, weight_VH: Tensor, form: HeadForm, temperature: float) -> Tensor:
    """Compute logits at the sampling temperature, in a tensor that nothing else uses."""
    logits_CV = (hidden_CH @ weight_VH.T).float()
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
