"""What an inference engine is: token ids in, token ids with log-probabilities and versions out.

Small protocols, so that a caller depends on what it uses:

    TokenGenerator   generate, prefill, abort, load_figures     used by env hosts, in process or over HTTP
    TokenStreamer    stream                                     a turn told while it is said, for those who wait for its text
    UpdatableEngine  load_version                               used by the worker that watches the weights
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, Literal, Protocol

import msgspec

FinishReason = Literal["stop", "length", "aborted"]


class KvHandle(msgspec.Struct, frozen=True, kw_only=True):
    """Where the KV of a prompt lies after a remote prefill: everything but the prompt's last token."""

    url: str
    """Fetched with the bearer token; answers once, then forgets."""
    token: str
    version: int
    """Version of the weights that computed it; KV of another version is never used."""
    num_tokens: int
    transfer: dict[str, Any] | None = None
    """What a KV connector of vLLM told its other end; with a URL that begins with "vllm:"."""


LOCAL_URL_PREFIX = "local:"
"""A handle whose URL begins so points into the engine that made it; a server puts its own address there."""
FetchKv = Callable[[KvHandle], Awaitable[bytes]]
"""Gets handed-over KV from where its handle points; EngineError if it cannot."""


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of one trajectory."""

    request_id: str
    token_ids: list[int]
    max_new_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    seed: int = 0
    """The same seed, prompt and weights give the same tokens on the same engine."""
    stop_token_ids: list[int] = []
    """Generation ends with the first of these, which is part of the answer."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that together have this probability; log-probabilities are of what is left."""
    top_k: int = 0
    """Draw from so many likeliest tokens; 0: from all."""
    top_logprobs: int = 0
    """How many of the likeliest tokens to tell for each place, at most TOP_LOGPROBS."""
    kv: KvHandle | None = None
    trajectory: str = ""
    """Turns of one trajectory have the same; engines may keep its KV by it. "": belongs to none."""
    domain: str = ""
    priority: int = 0
    """A waiting request with a smaller number goes first."""
    keep_kv_s: float = 0.0
    """For how long after this turn its KV is better kept than given up: the trajectory will likely be back by then."""


MAX_TOP_LOGPROBS = 20


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """What was generated; the three lists have one entry per token."""

    token_ids: list[int]
    logprobs: list[float]
    """Log-probability of each token under the weights and the temperature that sampled it."""
    versions: list[int]
    finish_reason: FinishReason
    remote_prefill: bool = False
    """True if the handed-over KV was used."""
    top: list[dict[int, float]] = []
    """For each token, if asked for: the likeliest tokens at its place with their log-probabilities."""


class CompletionChunk(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a completion; the lists have one entry per token of the piece."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: FinishReason | None = None
    """Only the last piece has one."""
    remote_prefill: bool = False
    top: list[dict[int, float]] = []


def convert_to_chunk(completion: Completion) -> CompletionChunk:
    """A whole completion as its only piece."""
    return msgspec.convert(completion, CompletionChunk, from_attributes=True)


def join_chunks(chunks: Sequence[CompletionChunk]) -> Completion:
    """The completion that these pieces are; one that was cut short is `aborted`."""
    return Completion(
        token_ids=[token for chunk in chunks for token in chunk.token_ids],
        logprobs=[logprob for chunk in chunks for logprob in chunk.logprobs],
        versions=[version for chunk in chunks for version in chunk.versions],
        finish_reason=(chunks[-1].finish_reason if chunks else None) or "aborted",
        remote_prefill=any(chunk.remote_prefill for chunk in chunks),
        top=[top for chunk in chunks for top in chunk.top],
    )


class LoadFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What a router needs to know of an engine."""

    version: int
    num_running: int
    num_waiting: int
    num_generated_tokens: int
    """Since the engine started."""
    running_tokens: int = 0
    """Tokens of KV that the running requests hold."""
    free_kv_tokens: int | None = None
    """Tokens of KV that there is room for; None if the engine cannot tell."""
    num_places: int | None = None
    """Requests that it serves at once, at most; the others wait."""


class TokenGenerator(Protocol):
    """An engine as its callers see it."""

    async def generate(self, request: GenerateRequest) -> Completion: ...

    async def prefill(self, request: GenerateRequest) -> KvHandle: ...

    async def abort(self, request_id: str) -> None:
        """End a request between two steps; its `generate` answers with what it has and `aborted`."""

    async def load_figures(self) -> LoadFigures: ...


class TokenStreamer(Protocol):
    """An engine that tells a turn while it is said."""

    def stream(self, request: GenerateRequest) -> AsyncGenerator[CompletionChunk, None]:
        """The pieces of a turn as they come; closing it early ends the request."""


class InferenceEngine(TokenGenerator, TokenStreamer, Protocol):
    """An engine as a router needs it."""


class UpdatableEngine(Protocol):
    """An engine as the weight plane sees it."""

    async def load_version(self, version: int) -> float:
        """Take over a version of the weights; KV of running requests is recomputed.

        Returns for how many seconds generation stood still. WeightsError: what was in use stays in use, or, if the
        version was overwritten while it was read, the engine stands still until it is given another.
        """
