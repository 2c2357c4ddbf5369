"""What is said to a vLLM server and what it says, as plain values. Pure.

sampling_of          a request as vLLM's sampling parameters
completion_of        an answer of /inference/v1/generate
chunks_of, chunk_of  the same, told while it is made: events of a stream, and the tokens in one
figures_of           load figures out of /metrics
"""

import json
import re
from collections.abc import AsyncIterable, AsyncIterator
from typing import Any, NamedTuple

import msgspec

from hpcrl.engines.base import Completion, FinishReason, GenerateRequest, Part, joined
from hpcrl.errors import EngineError

_METRIC = re.compile(r"^vllm:(\w+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
_CAPACITY = re.compile(r'^vllm:cache_config_info\{.*kv_cache_size_tokens="(\d+)"', re.MULTILINE)
_FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "aborted"}
MAX_SEED = (1 << 63) - 1
CLAMPED = -9998.0
"""vLLM writes -9999 where a log-probability is not finite."""


def sampling_of(request: GenerateRequest, *, max_new_tokens: int) -> dict[str, Any]:
    """Nothing of the model's own defaults: it samples as the trainer assumes."""
    return {
        "max_tokens": max_new_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "seed": request.seed & MAX_SEED,
        "stop_token_ids": request.stop_token_ids,
        "ignore_eos": True,  # the request names its stop tokens
        "detokenize": False,
        "logprobs": request.top_logprobs + 1,  # the first is the sampled token, likely or not
    }


def completion_of(answer: Any, *, num_top: int, remote_prefill: bool) -> Completion:
    """EngineError if it is not what was asked for."""
    piece = chunk_of(answer, num_top=num_top)
    if len(piece.versions) != len(piece.token_ids) or piece.finish_reason is None:
        raise EngineError(
            f"vLLM answered {len(piece.token_ids)} tokens, {len(piece.versions)} versions "
            f"and finish_reason {piece.finish_reason!r}"
        )
    return joined([msgspec.structs.replace(piece, remote_prefill=remote_prefill)])


def chunk_of(answer: Any, *, num_top: int) -> Part:
    """The tokens in one answer; `versions` are those of all tokens so far, and there in the last one only."""
    try:
        choice = answer["choices"][0]
        content = (choice["logprobs"] or {}).get("content") or []
        piece = Part(
            token_ids=[int(token) for token in choice["token_ids"] or []],
            logprobs=[float(entry["logprob"]) for entry in content],
            versions=_versions(choice.get("weight_versions") or []),
            finish_reason=None if choice["finish_reason"] is None else _FINISH[choice["finish_reason"]],
            top=[_likeliest(entry["top_logprobs"], num_top) for entry in content] if num_top else [],
        )
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise EngineError(f"vLLM's answer is not understood ({error!r}): {str(answer)[:300]}") from error
    if len(piece.token_ids) != len(piece.logprobs):
        raise EngineError(f"vLLM answered {len(piece.token_ids)} tokens and {len(piece.logprobs)} log-probabilities")
    if not all(logprob > CLAMPED for logprob in piece.logprobs):
        raise EngineError("the weights give a log-probability that is not finite: this version is damaged")
    return piece


async def chunks_of(content: AsyncIterable[bytes]) -> AsyncIterator[Any]:
    """The events of a stream as they come."""
    begun = b""
    async for data in content:
        *lines, begun = (begun + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data: ") and line != b"data: [DONE]":
                yield json.loads(line[6:])


def _likeliest(entries: list[dict[str, Any]], num: int) -> dict[int, float]:
    """vLLM puts the sampled token first, then the likeliest."""
    ranked = sorted(entries, key=lambda entry: -float(entry["logprob"]))[:num]
    return {int(entry["token_id"]): float(entry["logprob"]) for entry in ranked}


def _versions(spans: list[dict[str, Any]]) -> list[int]:
    """One version a token, out of runs of tokens."""
    return [int(span["version"]) for span in spans for _ in range(span["start"], span["end"])]


class Figures(NamedTuple):
    """What the server says of its load."""

    num_waiting: int
    num_generated_tokens: int
    kv_used_share: float
    kv_tokens: int
    """That there is room for in all."""


def figures_of(metrics: str) -> Figures:
    """Out of the text of /metrics, summed over what a server counts apart."""
    totals = dict.fromkeys(("num_requests_waiting", "generation_tokens_total", "kv_cache_usage_perc"), 0.0)
    for name, value in _METRIC.findall(metrics):
        if name in totals:
            totals[name] += float(value)
    return Figures(
        num_waiting=int(totals["num_requests_waiting"]),
        num_generated_tokens=int(totals["generation_tokens_total"]),
        kv_used_share=totals["kv_cache_usage_perc"],
        kv_tokens=sum(map(int, _CAPACITY.findall(metrics))),
    )
