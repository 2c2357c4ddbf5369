"""Check that an engine can serve a request; a refusal names the values seen.

check_request           a request against the context and vocabulary of a model
check_asks_for_tokens   a request that must generate, not only prefill
check_scored_tokens     tokens to be scored
check_tokenizer_fits    a model directory: no id of its tokenizer is beyond the model's vocabulary
"""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from hpcrl.engines.base import MAX_TOP_LOGPROBS, GenerateRequest
from hpcrl.errors import EngineError, EngineRequestError
from hpcrl.models.model_config import read_model_config


def check_request(request: GenerateRequest, *, max_new_tokens: int, context_length: int, vocabulary: int) -> None:
    """Raise EngineRequestError unless a model with this context and vocabulary can serve the request."""
    num_prompt = len(request.token_ids)
    wrong = None
    if not request.token_ids:
        wrong = "the prompt is empty: send at least one token"
    elif num_prompt + max_new_tokens > context_length:
        wrong = (
            f"{num_prompt} prompt tokens and {max_new_tokens} new ones are {num_prompt + max_new_tokens}, "
            f"the model's context is {context_length}: shorten the prompt or lower max_new_tokens"
        )
    elif not 0 <= min(request.token_ids) <= max(request.token_ids) < vocabulary:
        wrong = f"token ids must be in 0..{vocabulary - 1}: was the prompt made with another tokenizer?"
    elif not 0 <= request.temperature < float("inf"):
        wrong = f"temperature is {request.temperature}: it must be 0 (greedy) or a positive number"
    elif not 0 < request.top_p <= 1 or request.top_k < 0:
        wrong = (
            f"top_p is {request.top_p} and top_k is {request.top_k}: "
            "top_p must be above 0 and at most 1, top_k 0 (all tokens) or more"
        )
    elif not 0 <= request.top_logprobs <= MAX_TOP_LOGPROBS:
        wrong = f"top_logprobs is {request.top_logprobs}: it must be 0 to {MAX_TOP_LOGPROBS}"
    elif not 0 <= request.num_answered < num_prompt:
        wrong = f"num_answered is {request.num_answered} of {num_prompt} tokens: at least one is before the answer"
    elif request.structure is not None and not request.stop_token_ids:
        wrong = "it has a structure and no stop_token_ids: name the token that ends a structured answer"
    if wrong is not None:
        raise EngineRequestError(f"request {request.request_id!r}: {wrong}")


def check_asks_for_tokens(request: GenerateRequest) -> None:
    """Raise EngineRequestError if no token may be generated."""
    if request.max_new_tokens < 1:
        raise EngineRequestError(f"max_new_tokens is {request.max_new_tokens}: ask for at least 1")


def check_scored_tokens(token_ids: Sequence[int], *, context_length: int, vocabulary: int) -> None:
    """Raise EngineError unless a model with this context and vocabulary can score the tokens."""
    if len(token_ids) > context_length:
        raise EngineError(f"{len(token_ids)} tokens are to be scored, the model's context is {context_length}")
    if len(token_ids) and not 0 <= min(token_ids) <= max(token_ids) < vocabulary:
        raise EngineError(f"token ids must be in 0..{vocabulary - 1}: was the text made with another tokenizer?")


def check_tokenizer_fits(model: Path) -> None:
    """Raise EngineError if the tokenizer in `model` has ids beyond the model's vocabulary."""
    path = model / "tokenizer.json"
    known = read_model_config(model / "config.json").vocabulary_size
    if known is None or not path.is_file():  # the code that needs them reports it
        return
    try:
        highest = max(Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True).values(), default=-1)
    except Exception as error:  # tokenizers raises nothing narrower
        raise EngineError(f"{path} is not a tokenizer: {error}") from error
    if highest >= known:
        raise EngineError(
            f"the tokenizer {path} has ids up to {highest}, but the model beside it has only 0..{known - 1}: "
            "save the model with its own tokenizer, or with larger embeddings"
        )
