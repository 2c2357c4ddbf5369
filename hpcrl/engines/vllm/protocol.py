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

from hpcrl.engines.base import Completion, CompletionChunk, FinishReason, GenerateRequest, join_chunks
from hpcrl.errors import EngineError

_METRIC_PATTERN = re.compile(r"^vllm:(\w+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
_CAPACITY_PATTERN = re.compile(r'^vllm:cache_config_info\{.*kv_cache_size_tokens="(\d+)"', re.MULTILINE)
_FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "aborted"}
MAX_SEED = (1 << 63) - 1
CLAMPED_LOGPROB = -9998.0
"""vLLM writes -9999 where a log-probability is not finite."""


def build_sampling_params(request: GenerateRequest, *, max_new_tokens: int) -> dict[str, Any]:
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


def parse_completion(answer: Any, *, num_top: int, remote_prefill: bool) -> Completion:
    """EngineError if it is not what was asked for."""
    chunk = parse_chunk(answer, num_top=num_top)
    if len(chunk.versions) != len(chunk.token_ids) or chunk.finish_reason is None:
        raise EngineError(
            f"vLLM answered {len(chunk.token_ids)} tokens, {len(chunk.versions)} versions "
            f"and finish_reason {chunk.finish_reason!r}"
        )
    return join_chunks([msgspec.structs.replace(chunk, remote_prefill=remote_prefill)])


def parse_chunk(answer: Any, *, num_top: int) -> CompletionChunk:
    """The tokens in one answer; `versions` are those of all tokens so far, and there in the last one only."""
    try:
        choice = answer["choices"][0]
        content = (choice["logprobs"] or {}).get("content") or []
        chunk = CompletionChunk(
            token_ids=[int(token) for token in choice["token_ids"] or []],
            logprobs=[float(entry["logprob"]) for entry in content],
            versions=_expand_versions(choice.get("weight_versions") or []),
            finish_reason=None if choice["finish_reason"] is None else _FINISH_REASONS[choice["finish_reason"]],
            top=[_parse_likeliest(entry["top_logprobs"], num_top) for entry in content] if num_top else [],
        )
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise EngineError(f"vLLM's answer is not understood ({error!r}): {str(answer)[:300]}") from error
    if len(chunk.token_ids) != len(chunk.logprobs):
        raise EngineError(f"vLLM answered {len(chunk.token_ids)} tokens and {len(chunk.logprobs)} log-probabilities")
    if not all(logprob > CLAMPED_LOGPROB for logprob in chunk.logprobs):
        raise EngineError("the weights give a log-probability that is not finite: this version is damaged")
    return chunk


async def read_events(content: AsyncIterable[bytes]) -> AsyncIterator[Any]:
    """The events of a stream as they come."""
    rest = b""
    async for data in content:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data: ") and line != b"data: [DONE]":
                yield json.loads(line[6:])


def _parse_likeliest(entries: list[dict[str, Any]], num: int) -> dict[int, float]:
    """vLLM puts the sampled token first, then the likeliest."""
    ranked = sorted(entries, key=lambda entry: -float(entry["logprob"]))[:num]
    return {int(entry["token_id"]): float(entry["logprob"]) for entry in ranked}


def _expand_versions(spans: list[dict[str, Any]]) -> list[int]:
    """One version a token, out of runs of tokens."""
    return [int(span["version"]) for span in spans for _ in range(span["start"], span["end"])]


class ServerLoad(NamedTuple):
    """What the server says of its load."""

    num_waiting: int
    num_generated_tokens: int
    kv_used_share: float
    kv_tokens: int
    """That there is room for in all."""


def parse_metrics(metrics: str) -> ServerLoad:
    """Out of the text of /metrics, summed over what a server counts apart."""
    totals = dict.fromkeys(("num_requests_waiting", "generation_tokens_total", "kv_cache_usage_perc"), 0.0)
    for name, value in _METRIC_PATTERN.findall(metrics):
        if name in totals:
            totals[name] += float(value)
    return ServerLoad(
        num_waiting=int(totals["num_requests_waiting"]),
        num_generated_tokens=int(totals["generation_tokens_total"]),
        kv_used_share=totals["kv_cache_usage_perc"],
        kv_tokens=sum(map(int, _CAPACITY_PATTERN.findall(metrics))),
    )
