"""A causal model that returns the log-probs of tokens in place of logits, so that no rank ever holds all logits.

    TokenModel               the model
    compute_token_logprobs   log-probs and entropies at the model tokens of a micro-batch
    find_head_form           what a model does after its output layer; None if that is not known

The model's own code between its last hidden states and its logits is run once with hidden states that are made up. If
it is one plain linear layer, a scale and a soft cap, the logits are computed by chunks (hpcrl/learn/token_head.py);
any other model computes all its logits.

Legend: B rows of a micro-batch, T positions, K columns with a model token in any row, N model tokens, H hidden size
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hpcrl.learn.batch import MicroBatch
from hpcrl.learn.loss import logprobs_and_entropy
from hpcrl.learn.token_head import HeadForm, compute_from_hidden


class TokenHead(torch.nn.Module):
    """The output layer of a model, called with the targets of the hidden states."""

    def __init__(self, linear: torch.nn.Linear, form: HeadForm) -> None:
        super().__init__()
        self.linear = linear
        self._form = form

    def forward(
        self, hidden_NH: Tensor, targets_N: Tensor, *, temperature: float, has_entropy_bonus: bool
    ) -> tuple[Tensor, Tensor]:
        return compute_from_hidden(
            hidden_NH,
            self.linear.weight,
            targets_N,
            form=self._form,
            temperature=temperature,
            has_entropy_bonus=has_entropy_bonus,
        )


class TokenModel(torch.nn.Module):
    """A causal model, perhaps with adapters, that is called with tokens and their targets."""

    def __init__(self, causal: Any) -> None:
        super().__init__()
        self.causal = causal
        base = causal.get_base_model() if hasattr(causal, "peft_config") else causal
        form = find_head_form(base)
        self.head = None if form is None else TokenHead(base.get_output_embeddings(), form)
        self._find_decoder: Callable[[], Any] | None = getattr(base, "get_decoder", None)

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
        # No attention mask: the padding is on the right of a causal model, and without a mask attention is fastest.
        if self.head is not None and self._find_decoder is not None:
            decoder = self._find_decoder()
            hidden_BTH = decoder(inputs_BT, position_ids=positions_BT, use_cache=False).last_hidden_state
            computed: tuple[Tensor, Tensor] = self.head(
                hidden_BTH[mask_BT], targets_N, temperature=temperature, has_entropy_bonus=has_entropy_bonus
            )
            return computed
        kept_K = mask_BT.any(0).nonzero().squeeze(-1)
        if not len(kept_K):
            kept_K = kept_K.new_zeros(1)  # a pass without a gradient must still run every layer
        logits_BKV = self.causal(inputs_BT, position_ids=positions_BT, logits_to_keep=kept_K, use_cache=False).logits
        with torch.autocast(inputs_BT.device.type, enabled=False):
            return logprobs_and_entropy(
                logits_BKV[mask_BT[:, kept_K]],
                targets_N,
                temperature=temperature,
                has_entropy_bonus=has_entropy_bonus,
            )


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


def _run_after_decoder(causal: Any, hidden_BTH: Tensor, product_V: Tensor) -> SimpleNamespace | None:
    """Run a model's own code around its decoder and head, which give these; return the head's input and the logits."""
    decoder, head, given = causal.get_decoder(), causal.get_output_embeddings(), []
    if decoder is causal:
        return None

    def answer(hidden: Tensor) -> Tensor:
        given.append(hidden)
        return product_V.view(1, 1, -1)

    made_up = SimpleNamespace(
        last_hidden_state=hidden_BTH, past_key_values=None, hidden_states=None, attentions=None, router_logits=None
    )
    decoder.forward, head.forward = (lambda *_, **__: made_up), answer
    try:
        with torch.no_grad():
            logits_BTV = causal(torch.zeros(1, 1, dtype=torch.long), use_cache=False).logits
    except (AttributeError, TypeError, ValueError, RuntimeError, NotImplementedError):
        return None
    finally:
        del decoder.forward, head.forward
    return SimpleNamespace(given=given[0], logits_V=logits_BTV.flatten()) if len(given) == 1 else None
