"""The structures of answers in the embedded engine: which tokens each row may generate next.

    GrammarCompiler  makes the matcher of a row
    AnswerMatcher    the state of a row's grammar
    mask_logits      exclude the tokens that the rows' grammars do not allow

The matcher belongs to the row, so updates of the weights, which recompute its KV, leave it as it is.
"""

import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer

from hpcrl.engines.base import GenerateRequest
from hpcrl.engines.structure import raise_matcher_error, read_token_names, write_grammar
from hpcrl.errors import EngineError


class AnswerMatcher:
    """The state of one row's grammar."""

    def __init__(self, matcher: LLMatcher, *, vocabulary: int) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary

    def accept(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)

    def find_allowed(self) -> torch.Tensor:
        """Return which tokens may be next, one truth value each; raises EngineRequestError if none may be."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        raise_matcher_error(self._matcher)
        return torch.from_numpy(np.unpackbits(bits, count=self._vocabulary, bitorder="little").astype(bool))


class GrammarCompiler:
    """The structures of requests, compiled for the tokenizer of one model."""

    def __init__(self, tokenizer: Path, *, vocabulary: int) -> None:
        self._path = tokenizer
        self._vocabulary = vocabulary

    def compile(self, request: GenerateRequest) -> AnswerMatcher:
        """Return the matcher of a request's answer, after the tokens that it has already; raises EngineError."""
        assert request.structure is not None
        grammar = write_grammar(
            request.structure,
            token_names=read_token_names(self._path),
            stop_token_ids=request.stop_token_ids,
        )
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        matcher.consume_tokens(request.token_ids[len(request.token_ids) - request.num_answered :])
        raise_matcher_error(matcher)
        return AnswerMatcher(matcher, vocabulary=self._vocabulary)

    @functools.cached_property
    def _tokenizer(self) -> LLTokenizer:
        try:
            return LLTokenizer(self._path.read_text(), n_vocab=self._vocabulary)
        except (OSError, ValueError) as error:
            raise EngineError(f"a structured answer needs the tokenizer {self._path}: {error}") from error


def mask_logits(logits_BV: torch.Tensor, matchers: Sequence[AnswerMatcher | None]) -> list[EngineError | None]:
    """Exclude, in place, the tokens that a row's grammar does not allow; returns why a row can have none, or None."""
    problems: list[EngineError | None] = []
    for row, matcher in enumerate(matchers):
        problems.append(None)
        if matcher is not None:
            try:
                allowed_V = matcher.find_allowed()
            except EngineError as error:
                problems[-1] = error
            else:
                logits_BV[row].masked_fill_(~allowed_V.to(logits_BV.device), -torch.inf)
    return problems
