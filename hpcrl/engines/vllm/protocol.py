"""Requests to a vLLM server and its answers, as plain values. Pure.

build_sampling_params      a request as vLLM's sampling parameters
parse_completion           an answer of /inference/v1/generate
ExpertForm, make_expert_form   the experts that an answer has
read_events, parse_chunk   the same as a stream: its events, and the tokens in one
parse_metrics, ServerLoad  the load in the text of /metrics
MAX_SEED, CLAMPED_LOGPROB  limits of vLLM
ADAPTERS_MODEL             what requests name to use adapters
"""

import base64
import io
import json
import re
from collections.abc import AsyncIterable, AsyncIterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from hpcrl.engines.base import Completion, CompletionChunk, FinishReason, GenerateRequest, join_chunks
from hpcrl.errors import EngineError
from hpcrl.hardware.architecture import read_architecture
from hpcrl.spool.routed_experts import ExpertSpan, choose_expert_dtype, make_span

_METRIC_PATTERN = re.compile(r"^vllm:(\w+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
_CAPACITY_PATTERN = re.compile(r'^vllm:cache_config_info\{.*kv_cache_size_tokens="(\d+)"', re.MULTILINE)
_FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "aborted"}
ADAPTERS_MODEL = "adapters"
"""The name of the adapters (hpcrl.engines.vllm.adapter_worker) among the models of a server."""
MAX_SEED = (1 << 63) - 1
CLAMPED_LOGPROB = -9998.0
"""vLLM writes -9999 where a log-probability is not finite."""


def build_sampling_params(
    request: GenerateRequest, *, max_new_tokens: int, grammar: str | None = None, has_seeds: bool = False
) -> dict[str, Any]:
    """Return the sampling parameters of a request; without the model's defaults, as the trainer assumes.

    A request with a seed is sampled by a separate generator, not with the batch: only those that need it have one.
    """
    structure = {} if grammar is None else {"structured_outputs": {"grammar": grammar}}
    experts = {} if request.experts_from is None else {"routed_experts_prompt_start": request.experts_from}
    seed = {"seed": request.seed & MAX_SEED} if has_seeds or request.needs_seed else {}
    return (
        structure
        | seed
        | experts
        | {
            "max_tokens": max_new_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "stop_token_ids": request.stop_token_ids,
            "ignore_eos": True,  # the request names its stop tokens
            "detokenize": False,
            "logprobs": request.top_logprobs + 1,  # the first is the sampled token, likely or not
        }
    )


class ExpertForm(NamedTuple):
    """The experts that an answer has: vLLM reports all layers, also those without any."""

    start: int
    """The first token that was asked for."""
    layers: Sequence[int]
    """The layers with experts."""
    num_experts: int

    def parse(self, text: str) -> ExpertSpan:
        """Parse what vLLM reports: an array in NumPy's file format, in base64."""
        experts_NLK = np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
        chosen_NLK = experts_NLK[:, list(self.layers)].astype(choose_expert_dtype(self.num_experts))
        return make_span(self.start, chosen_NLK)


def make_expert_form(fields: Mapping[str, Any], *, start: int) -> ExpertForm:
    """Return the form of an answer from a token on, by the fields of the model's config.json."""
    shape = read_architecture(fields)
    layers = [layer for layer in range(shape.num_layers) if layer not in shape.dense_layers]
    return ExpertForm(start=start, layers=layers, num_experts=shape.num_experts)


def parse_completion(
    answer: Any, *, num_top: int, remote_prefill: bool, experts: ExpertForm | None = None
) -> Completion:
    """Parse a whole answer; raises EngineError if it does not match the request."""
    chunk = parse_chunk(answer, num_top=num_top, experts=experts)
    if len(chunk.versions) != len(chunk.token_ids) or chunk.finish_reason is None:
        raise EngineError(
            f"vLLM answered {len(chunk.token_ids)} tokens, {len(chunk.versions)} versions "
            f"and finish_reason {chunk.finish_reason!r}"
        )
    return join_chunks([msgspec.structs.replace(chunk, remote_prefill=remote_prefill)])


def parse_chunk(answer: Any, *, num_top: int, experts: ExpertForm | None = None) -> CompletionChunk:
    """Parse the tokens of one event; only the last has `versions` and `experts`, which are those of all tokens so far.

    `experts` is what was asked for of them.
    """
    try:
        choice = answer["choices"][0]
        content = (choice["logprobs"] or {}).get("content") or []
        chunk = CompletionChunk(
            token_ids=[int(token) for token in choice["token_ids"] or []],
            logprobs=[float(entry["logprob"]) for entry in content],
            versions=_expand_versions(choice.get("weight_versions") or []),
            finish_reason=None if choice["finish_reason"] is None else _FINISH_REASONS[choice["finish_reason"]],
            top=[_parse_likeliest(entry["top_logprobs"], num_top) for entry in content] if num_top else [],
            experts=[experts.parse(text)] if experts and (text := choice.get("routed_experts")) else [],
        )
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise EngineError(f"vLLM sent an invalid answer ({error!r}): {str(answer)[:300]}") from error
    if len(chunk.token_ids) != len(chunk.logprobs):
        raise EngineError(f"vLLM answered {len(chunk.token_ids)} tokens and {len(chunk.logprobs)} log-probabilities")
    if experts is not None and chunk.finish_reason in ("stop", "length") and not chunk.experts:
        raise EngineError(
            "vLLM reported no experts, which train.router_replay = true needs: use vLLM 0.32, or remove it"
        )
    if not all(logprob > CLAMPED_LOGPROB for logprob in chunk.logprobs):
        raise EngineError("the weights give a log-probability that is not finite: this version is damaged")
    return chunk


async def read_events(content: AsyncIterable[bytes]) -> AsyncIterator[Any]:
    """Yield the events of a stream as they are received."""
    rest = b""
    async for data in content:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data: ") and line != b"data: [DONE]":
                yield json.loads(line[6:])


def _parse_likeliest(entries: list[dict[str, Any]], num: int) -> dict[int, float]:
    """Return the `num` likeliest entries that can be sampled; vLLM puts the sampled token before them."""
    ranked = sorted(entries, key=lambda entry: -float(entry["logprob"]))[:num]
    found = {int(entry["token_id"]): float(entry["logprob"]) for entry in ranked}
    return {token: logprob for token, logprob in found.items() if logprob > CLAMPED_LOGPROB}


def _expand_versions(spans: list[dict[str, Any]]) -> list[int]:
    """Return one version per token from spans of tokens."""
    return [int(span["version"]) for span in spans for _ in range(span["start"], span["end"])]


class ServerLoad(NamedTuple):
    """The load that the server reports."""

    num_waiting: int
    num_generated_tokens: int
    kv_used_share: float
    kv_tokens: int
    """The capacity, used and free."""
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    num_preemptions: int = 0


def parse_metrics(metrics: str) -> ServerLoad:
    """Read the load from the text of /metrics, over all copies of the model in the server."""
    totals = dict.fromkeys(
        (
            "num_requests_waiting", "generation_tokens_total", "kv_cache_usage_perc", "prefix_cache_queries_total",
            "prefix_cache_hits_total", "num_preemptions_total",
        ),
        0.0,
    )  # fmt: skip
    num_copies = 0
    for name, value in _METRIC_PATTERN.findall(metrics):
        if name in totals:
            totals[name] += float(value)
            num_copies += name == "kv_cache_usage_perc"
    return ServerLoad(
        num_waiting=int(totals["num_requests_waiting"]),
        num_generated_tokens=int(totals["generation_tokens_total"]),
        kv_used_share=totals["kv_cache_usage_perc"] / max(num_copies, 1),
        kv_tokens=sum(map(int, _CAPACITY_PATTERN.findall(metrics))),
        num_prefix_queries=int(totals["prefix_cache_queries_total"]),
        num_prefix_hits=int(totals["prefix_cache_hits_total"]),
        num_preemptions=int(totals["num_preemptions_total"]),
    )
