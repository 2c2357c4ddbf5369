"""Log-probs by chunks of tokens: the numbers and gradients of whole logits, in a small part of their memory."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hpcrl.learn import token_head
from hpcrl.learn.loss import logprobs_and_entropy
from hpcrl.learn.token_head import HeadForm, compute_from_hidden

NUM, HIDDEN, VOCABULARY = 37, 8, 50
FORMS = {
    "plain": HeadForm(),
    "scaled": HeadForm(scale=0.3),
    "capped": HeadForm(cap=3.0),
    "scaled and capped": HeadForm(2.0, 5.0),
}


def make_inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(NUM, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(VOCABULARY, (NUM,), generator=generator)


def differentiate(logprobs_N, entropy_N, inputs, *, has_entropy_bonus):
    """Return both results and the gradients of a loss that is not linear in them."""
    loss = (torch.linspace(-1, 2, NUM) * logprobs_N.exp()).sum()
    if has_entropy_bonus:
        loss = loss - 0.3 * entropy_N.square().sum()
    return [logprobs_N.detach(), entropy_N.detach(), *torch.autograd.grad(loss, inputs)]


@pytest.mark.parametrize("has_entropy_bonus", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_chunks_give_the_log_probs_entropies_and_gradients_of_whole_logits(
    monkeypatch, form, temperature, has_entropy_bonus
):
    hidden, weight, targets = make_inputs()
    options = {"temperature": temperature, "has_entropy_bonus": has_entropy_bonus}
    whole = logprobs_and_entropy(form.apply(hidden @ weight.T), targets, **options)
    expected = differentiate(*whole, (hidden, weight), has_entropy_bonus=has_entropy_bonus)
    monkeypatch.setattr(token_head, "MAX_CHUNK_LOGITS", 5 * VOCABULARY + 1)
    chunked = compute_from_hidden(hidden, weight, targets, form=form, **options)
    assert chunked[1].requires_grad == has_entropy_bonus
    found = differentiate(*chunked, (hidden, weight), has_entropy_bonus=has_entropy_bonus)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_a_frozen_head_gets_no_gradient_and_an_empty_batch_gives_zeros(monkeypatch):
    monkeypatch.setattr(token_head, "MAX_CHUNK_LOGITS", VOCABULARY)
    hidden, weight, targets = make_inputs()
    options = {"form": HeadForm(), "temperature": 1.0, "has_entropy_bonus": False}
    compute_from_hidden(hidden, weight.detach(), targets, **options)[0].sum().backward()
    assert weight.grad is None
    assert hidden.grad is not None
    empty = compute_from_hidden(hidden[:0], weight, targets[:0], **options)[0]
    empty.sum().backward()
    assert not weight.grad.any()


def test_under_autocast_chunks_have_the_numbers_of_whole_logits_in_bf16(monkeypatch):
    hidden, weight, targets = make_inputs()
    options = {"form": HeadForm(), "temperature": 0.9, "has_entropy_bonus": False}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        whole = compute_from_hidden(hidden, weight, targets, **options)
        monkeypatch.setattr(token_head, "MAX_CHUNK_LOGITS", 4 * VOCABULARY)
        chunked = compute_from_hidden(hidden, weight, targets, **options)
    assert chunked[0].dtype == torch.float32
    torch.testing.assert_close(chunked[0], whole[0], rtol=1e-5, atol=1e-5)
    gradients = [differentiate(*made, (hidden, weight), has_entropy_bonus=False)[2:] for made in (whole, chunked)]
    for theirs, mine in zip(*gradients, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, theirs, rtol=0.02, atol=0.02)


class LargestTensor(TorchDispatchMode):
    """The most values of any tensor that is made."""

    num_values = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple) else (made,):
            if isinstance(tensor, torch.Tensor):
                self.num_values = max(self.num_values, tensor.numel())
        return made


def test_no_tensor_has_more_logits_than_a_chunk(monkeypatch):
    limit = 16 * VOCABULARY
    monkeypatch.setattr(token_head, "MAX_CHUNK_LOGITS", limit)
    hidden, weight, targets = make_inputs()
    with LargestTensor() as largest:
        logprobs, entropy = compute_from_hidden(
            hidden, weight, targets, form=HeadForm(cap=3.0), temperature=0.5, has_entropy_bonus=True
        )
        (logprobs.sum() + entropy.sum()).backward()
    assert limit / 2 < largest.num_values <= limit < NUM * VOCABULARY


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_what_is_done_between_the_products_can_be_compiled_whole(monkeypatch, form):
    inputs = make_inputs()
    options = {"form": form, "temperature": 0.7, "has_entropy_bonus": True}
    monkeypatch.setattr(token_head, "MAX_CHUNK_LOGITS", 5 * VOCABULARY + 1)
    plain, compiled = [], []

    def run_compiled(work, *arguments):
        compiled.append(work)
        return torch.compile(work, dynamic=True, fullgraph=True, backend="aot_eager")(*arguments)

    for run in (token_head._run_fused, run_compiled):
        monkeypatch.setattr(token_head, "_run_fused", run)
        plain.append(differentiate(*compute_from_hidden(*inputs, **options), inputs[:2], has_entropy_bonus=True))
    assert len(set(compiled)) == 2
    torch.testing.assert_close(plain[1], plain[0])
