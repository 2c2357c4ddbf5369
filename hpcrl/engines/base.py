"""The protocols of an inference engine: token ids in, token ids with log-probabilities and versions out.

The protocols are small, so that a caller depends only on what it uses:

    TokenGenerator   generate, prefill, abort, load_figures: for env workers, in process or over HTTP
    TokenStreamer    stream: a turn is sent while it is generated
    InferenceEngine  both of them, as a router needs it
    UpdatableEngine  load_version: for the worker that watches the weights
    SleepingEngine   sleep, wake_weights, resume: for a worker whose GPUs are also the trainer's
    TokenScorer      compute_logprobs: of tokens that it did not generate

and these are the values they exchange:

    GenerateRequest                   one turn of one trajectory
    OutputStructure                   what the text of its answer must be: a sequence of parts
    ExactText, JsonValue, FreeText, PartChoice  the parts
    Completion, CompletionChunk       its answer, whole or in chunks
    convert_to_chunk, join_chunks     from one to the other
    KvHandle, FetchKv                 the KV of a remote prefill, and how it is fetched
    LoadFigures                       the load of an engine
    FinishReason                      why generation ended
    LOCAL_URL_PREFIX, MAX_LOAD_AGE_S, MAX_TOP_LOGPROBS  constants of these formats
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import msgspec

from hpcrl.spool.routed_experts import ExpertSpan

T = TypeVar("T")

FinishReason = Literal["stop", "length", "aborted"]


class KvHandle(msgspec.Struct, frozen=True, kw_only=True):
    """A pointer to the KV of a prompt after a remote prefill: all of it but the last token's."""

    url: str
    """The KV can be fetched there once, with the bearer token: the engine then deletes it."""
    token: str
    version: int
    """The version of the weights that computed it; KV of another version is never used."""
    num_tokens: int
    transfer: dict[str, Any] | None = None
    """Parameters of a vLLM KV connector for the receiving engine; the URL then starts with "vllm:"."""


class ExactText(msgspec.Struct, frozen=True, kw_only=True, tag="text"):
    """The part of an answer that is exactly this text; names of special tokens in it stand for these tokens."""

    text: str


class JsonValue(msgspec.Struct, frozen=True, kw_only=True, tag="json"):
    """The part of an answer that is JSON of this JSON Schema; `{"type": "object"}` is any object."""

    schema: dict[str, Any]


class FreeText(msgspec.Struct, frozen=True, kw_only=True, tag="free"):
    """The part of an answer that is any text up to and including `until`: reasoning, or an argument without quotes."""

    until: str


class PartChoice(msgspec.Struct, frozen=True, kw_only=True, tag="choice"):
    """The part of an answer that is one of several sequences of parts, such as the calls of several tools.

    The start of a sequence must show which one it is: a text that starts like JSON cannot be an alternative to JSON.
    """

    alternatives: list[list["OutputPart"]]
    """An empty sequence among them makes the choice optional."""
    may_repeat: bool = False
    """True: one or more of them, in any order."""
    separator: str = ""
    """The text between two of them."""


OutputPart = ExactText | JsonValue | FreeText | PartChoice


class OutputStructure(msgspec.Struct, frozen=True, kw_only=True):
    """The required form of an answer: these parts, and then a stop token. All other tokens have probability 0."""

    parts: list[OutputPart]


LOCAL_URL_PREFIX = "local:"
"""A handle with this URL prefix points into the engine that made it; a server replaces it with its own address."""
MAX_LOAD_AGE_S = 0.25
"""The age up to which a server sends the same figures to all who ask: an engine may have to compute them."""
FetchKv = Callable[[KvHandle], Awaitable[bytes]]
"""Fetch the KV that a handle points to; raises EngineError."""


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of one trajectory."""

    request_id: str
    token_ids: list[int]
    max_new_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    seed: int = 0
    """The same seed, prompt and weights give the same tokens on the same engine, if it uses the seed."""
    needs_seed: bool = False
    """True if an agent asked for a seed: engines use it also where seeds are slow, as with vLLM."""
    stop_token_ids: list[int] = []
    """Generation ends with the first of these, which is part of the answer."""
    top_p: float = 1.0
    """Sample from the likeliest tokens with this total probability; log-probabilities are of those tokens."""
    top_k: int = 0
    """Sample from this number of likeliest tokens; 0: from all."""
    top_logprobs: int = 0
    """The number of likeliest tokens to report at each position, at most MAX_TOP_LOGPROBS."""
    structure: OutputStructure | None = None
    """The required form of the answer's text; log-probabilities are of the tokens that this allows."""
    num_answered: int = 0
    """The last tokens of `token_ids` that are the answer so far, if another engine has made a part of it: the structure
    continues after them."""
    kv: KvHandle | None = None
    num_held: int = 0
    """In a request to prefill: the tokens whose KV the decode engine should have, so that only the rest is sent."""
    trajectory: str = ""
    """The same for all turns of a trajectory; engines may keep KV under it. "" belongs to none."""
    domain: str = ""
    priority: int = 0
    """A waiting request with a smaller number goes first."""
    keep_kv_s: float = 0.0
    """The time to keep the KV of this turn: the trajectory's next turn is likely to come by then."""
    experts_from: int | None = None
    """The first of `token_ids` whose experts are to be reported, with those of all tokens after it; None: of none."""
    min_version: int = 0
    """The version of the weights that `generate` and `prefill` wait for, for a while: it is about to be loaded."""


MAX_TOP_LOGPROBS = 20


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The generated tokens; the three lists have one entry per token."""

    token_ids: list[int]
    logprobs: list[float]
    """The log-probability of each token under the weights and the temperature that sampled it."""
    versions: list[int]
    finish_reason: FinishReason
    remote_prefill: bool = False
    """True if the handed-over KV was used."""
    top: list[dict[int, float]] = []
    """The likeliest tokens at each token's position with their log-probabilities, if requested."""
    experts: list[ExpertSpan] = []
    """The experts of tokens of prompt and answer, if requested; no pass has read the last token of the answer."""


class CompletionChunk(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a completion; the lists have one entry per token of the chunk."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: FinishReason | None = None
    """Set in the last chunk only."""
    remote_prefill: bool = False
    top: list[dict[int, float]] = []
    experts: list[ExpertSpan] = []
    """The experts of tokens, up to the one before the last token of the chunk."""


def convert_to_chunk(completion: Completion) -> CompletionChunk:
    """Return a complete completion as its only chunk."""
    return CompletionChunk(**{name: getattr(completion, name) for name in CompletionChunk.__struct_fields__})


def join_chunks(chunks: Sequence[CompletionChunk]) -> Completion:
    """Join chunks to a completion; one without a finish reason is `aborted`."""
    return Completion(
        token_ids=_join_lists([chunk.token_ids for chunk in chunks]),
        logprobs=_join_lists([chunk.logprobs for chunk in chunks]),
        versions=_join_lists([chunk.versions for chunk in chunks]),
        finish_reason=(chunks[-1].finish_reason if chunks else None) or "aborted",
        remote_prefill=any(chunk.remote_prefill for chunk in chunks),
        top=_join_lists([chunk.top for chunk in chunks]),
        experts=_join_lists([chunk.experts for chunk in chunks]),
    )


def _join_lists(parts: Sequence[list[T]]) -> list[T]:
    """Join lists; one alone is not copied."""
    return parts[0] if len(parts) == 1 else [one for part in parts for one in part]


class LoadFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The load of an engine, as a router needs it."""

    version: int
    num_running: int
    num_waiting: int
    num_generated_tokens: int
    """Since the engine started."""
    running_tokens: int = 0
    """Tokens of KV held by running requests."""
    free_kv_tokens: int | None = None
    """Tokens of KV that there is room for; None if the engine does not report it."""
    num_places: int | None = None
    """The most requests it runs at once; others wait."""
    is_asleep: bool = False
    """True while the trainer has its GPUs: all its requests wait."""
    num_prefix_queries: int | None = None
    """Prompt tokens looked up in the prefix cache since the engine started; None if the engine does not report it."""
    num_prefix_hits: int | None = None
    """The tokens of them whose KV was there."""
    num_preemptions: int | None = None
    """Requests that lost their KV to others, and were computed again, since the engine started."""


class TokenGenerator(Protocol):
    """An engine as its callers see it."""

    async def generate(self, request: GenerateRequest) -> Completion: ...

    async def prefill(self, request: GenerateRequest) -> KvHandle: ...

    async def abort(self, request_id: str) -> None:
        """End a request between two steps; its `generate` returns the tokens so far and `aborted`."""

    async def load_figures(self) -> LoadFigures: ...


class TokenStreamer(Protocol):
    """An engine that sends a turn while it is generated."""

    def stream(self, request: GenerateRequest) -> AsyncGenerator[CompletionChunk, None]:
        """Yield the chunks of a turn as they are generated; closing the generator early ends the request."""


@runtime_checkable
class TokenScorer(Protocol):
    """An engine that scores tokens which it did not generate."""

    async def compute_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-prob of each token after the first, at temperature 1; EngineError if there is none."""


class InferenceEngine(TokenGenerator, TokenStreamer, Protocol):
    """An engine as a router needs it."""


class UpdatableEngine(Protocol):
    """An engine as the weight plane sees it."""

    async def load_version(self, version: int) -> float:
        """Switch to a version of the weights; the KV of running requests is recomputed.

        Returns for how many seconds generation was paused. After a WeightsError the weights in use stay in use or,
        if the version was overwritten while it was read, generation stays paused until another version is loaded.
        """


class SleepingEngine(Protocol):
    """An engine that can leave its GPUs to others for a while; running requests continue afterwards."""

    async def sleep(self) -> None:
        """Pause generation, and leave the memory of the GPUs; KV is lost."""

    async def wake_weights(self) -> None:
        """Have the weights as a version can be loaded over them: `load_version` may be called, and nothing resumes."""

    async def resume(self) -> None:
        """Have all memory again, and continue to generate."""
