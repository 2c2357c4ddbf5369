"""What an inference engine is: token ids in, token ids with log-probabilities and versions out.

Two small protocols, so that a caller depends on what it uses:

    Generator   generate, prefill, abort, load_figures     used by env hosts, in process or over HTTP
    Updatable   pause, load_version, resume                used by the worker that watches the weights
"""

from collections.abc import Awaitable, Callable
from typing import Literal, Protocol

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


LOCAL = "local:"
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
    kv: KvHandle | None = None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """What was generated; the three lists have one entry per token."""

    token_ids: list[int]
    logprobs: list[float]
    """Log-probability of each token under the weights and the temperature that sampled it."""
    versions: list[int]
    finish_reason: FinishReason
    remote_prefill: bool = False
    """True if the handed-over KV was used."""


class LoadFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What a router needs to know of an engine."""

    version: int
    num_running: int
    num_waiting: int
    num_generated_tokens: int
    """Since the engine started."""


class Generator(Protocol):
    """An engine as its callers see it."""

    async def generate(self, request: GenerateRequest) -> Completion: ...

    async def prefill(self, request: GenerateRequest) -> KvHandle: ...

    async def abort(self, request_id: str) -> None:
        """End a request between two steps; its `generate` answers with what it has and `aborted`."""

    async def load_figures(self) -> LoadFigures: ...


class Updatable(Protocol):
    """An engine as the weight plane sees it."""

    async def pause(self) -> None:
        """Stop between two steps and keep the requests."""

    async def load_version(self, version: int) -> float:
        """Take over a version of the weights; KV of running requests is recomputed.

        Returns for how many seconds generation stood still. WeightsError: what was in use stays in use, or, if the
        version was overwritten while it was read, the engine stands still until it is given another.
        """

    async def resume(self) -> None: ...
