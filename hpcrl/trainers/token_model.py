"""A causal model that returns the log-probs of tokens in place of logits, so that no rank ever holds all logits.

    TokenModel               the model
    compute_token_logprobs   log-probs and entropies at the model tokens of a micro-batch
    find_head_form           what a model does after its output layer; None if that is not known

The model's own code between its last hidden states and its logits is run once with hidden states that are made up. If
it is one plain linear layer, a scale and a soft cap, the logits are computed by chunks (hpcrl/learn/token_head.py);
any other model computes all its logits.

Legend: B rows of a micro-batch, T positions, S those of this rank, K columns with a model token in any row, N model
tokens, H hidden size
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from hpcrl.learn.batch import MicroBatch
from hpcrl.learn.loss import logprobs_and_entropy
from hpcrl.learn.token_head import HeadForm, compute_from_hidden
from hpcrl.trainers.context_group import WHOLE_CONTEXT, ContextGroup, use_context_attention


class TokenModel(torch.nn.Module):
    """A causal model, perhaps with adapters, that is called with tokens and their targets."""

    def __init__(self, causal: Any, *, context: ContextGroup = WHOLE_CONTEXT) -> None:
        """Call a model; the ranks of `context` divide the positions of the rows, and each returns all log-probs."""
        super().__init__()
        self.causal = causal
        self._context = use_context_attention(causal, context)
        form = find_head_form(causal)
        self._has_chunks = form is not None
        if form is not None:
            head = causal.get_output_embeddings()
            # The layer itself is called, so that one that is sharded gathers its weight.
            head.forward = partial(_call_head, head, form=form)

    def list_outer_layers(self) -> list[torch.nn.Module]:
        """Return the embeddings and the head as modules that are called; none if they share their weight."""
        if not self._has_chunks:
            return []
        embeddings, head = self.causal.get_input_embeddings(), self.causal.get_output_embeddings()
        return [] if embeddings.weight is head.weight else [embeddings, head]

    def forward(
        self,
        inputs_BT: Tensor,
        mask_BT: Tensor,
        targets_N: Tensor,
        *,
        positions_BT: Tensor | None,
        temperature: float,
        has_entropy_bonus: bool,
    ) -> tuple[Tensor, Tensor]:
        part = self._context.divide(inputs_BT, mask_BT, positions_BT=positions_BT)
        # No attention mask: the padding is on the right of a causal model, and without a mask attention is fastest.
        if self._has_chunks:
            decoder, head = self.causal.get_decoder(), self.causal.get_output_embeddings()
            hidden_BSH = decoder(
                part.inputs_BS, position_ids=part.positions_BS, use_cache=False, **part.options
            ).last_hidden_state
            computed = head(
                hidden_BSH[part.mask_BS],
                part.select(targets_N),
                temperature=temperature,
                has_entropy_bonus=has_entropy_bonus,
            )
            logprobs_N, entropy_N = part.join(*computed)
            return logprobs_N, entropy_N
        kept_K = part.mask_BS.any(0).nonzero().squeeze(-1)
        if not len(kept_K):
            kept_K = kept_K.new_zeros(1)  # a pass without a gradient must still run every layer
        logits_BKV = self.causal(
            part.inputs_BS, position_ids=part.positions_BS, logits_to_keep=kept_K, use_cache=False, **part.options
        ).logits
        with torch.autocast(inputs_BT.device.type, enabled=False):
            computed = logprobs_and_entropy(
                logits_BKV[part.mask_BS[:, kept_K]],
                part.select(targets_N),
                temperature=temperature,
                has_entropy_bonus=has_entropy_bonus,
            )
            logprobs_N, entropy_N = part.join(*computed)
            return logprobs_N, entropy_N


def _call_head(
    head: torch.nn.Linear, hidden_NH: Tensor, targets_N: Tensor | None = None, *, form: HeadForm, **options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """Call an output layer: with targets for their log-probs, without for logits, as the model itself calls it."""
    if targets_N is None:
        return torch.nn.functional.linear(hidden_NH, head.weight)
    return compute_from_hidden(hidden_NH, head.weight, targets_N, form=form, **options)


def compute_token_logprobs(
    model: Callable[..., Any], micro: MicroBatch, *, temperature: float, has_entropy_bonus: bool = False
) -> tuple[Tensor, Tensor]:
    """Compute the log-probs of the micro-batch's model tokens, and the entropies of their distributions."""
    found: tuple[Tensor, Tensor] = model(
        micro.inputs_BT,
        micro.mask_BT,
        micro.targets_N,
        positions_BT=micro.positions_BT,
        temperature=temperature,
        has_entropy_bonus=has_entropy_bonus,
    )
    return found


def find_head_form(causal: Any) -> HeadForm | None:
    """Return the form of a model's logits, or None if they are more than one plain layer, a scale and a soft cap."""
    head = causal.get_output_embeddings() if hasattr(causal, "get_decoder") else None
    if type(head) is not torch.nn.Linear or head.bias is not None:
        return None
    made_up_BTH = torch.linspace(-1.0, 1.0, head.in_features).view(1, 1, -1)
    product_V = torch.tensor([-40.0, -3.0, -0.5, 0.5, 3.0, 40.0])
    seen = _run_after_decoder(causal, made_up_BTH, product_V)
    if seen is None or not torch.equal(seen.given, made_up_BTH):
        return None
    for form in _list_forms(causal, scale=float(seen.logits_V[3] / product_V[3])):
        if torch.allclose(form.apply(product_V), seen.logits_V, rtol=1e-6):
            return form
    return None


def _list_forms(causal: Any, *, scale: float) -> list[HeadForm]:
    """List the forms that a model may have, the plain one first."""
    cap = getattr(causal.config, "final_logit_softcapping", None)
    return [HeadForm(), HeadForm(scale=scale), *([] if cap is None else [HeadForm(cap=float(cap))])]


class _MadeUpOutput(SimpleNamespace):
    """The output of a decoder with nothing but these fields: versions of transformers have other names for the rest."""

    def __getattr__(self, name: str) -> None:
        return None


def _run_after_decoder(causal: Any, hidden_BTH: Tensor, product_V: Tensor) -> SimpleNamespace | None:
    """Run a model's own code around its decoder and head, which give these; return the head's input and the logits."""
    decoder, head, given = causal.get_decoder(), causal.get_output_embeddings(), []
    if decoder is causal:
        return None

    def answer(hidden: Tensor) -> Tensor:
        given.append(hidden)
        return product_V.view(1, 1, -1)

    made_up = _MadeUpOutput(last_hidden_state=hidden_BTH)
    try:
        with (
            torch.no_grad(),
            patch.object(decoder, "forward", lambda *_, **__: made_up),
            patch.object(head, "forward", answer),
        ):
            logits_BTV = causal(torch.zeros(1, 1, dtype=torch.long), use_cache=False).logits
    except (AttributeError, TypeError, ValueError, RuntimeError, NotImplementedError):
        return None
    return SimpleNamespace(given=given[0], logits_V=logits_BTV.flatten()) if len(given) == 1 else None
