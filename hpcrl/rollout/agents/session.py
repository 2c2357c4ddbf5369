"""Session of one agent program: its limits, its engine requests and their recording.

ProgramSession   one attempt at an episode
SamplingSource   whose sampling parameters apply
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from hpcrl.engines.base import GenerateRequest
from hpcrl.rollout.agents.recording import ConversationChoice, ConversationRecording, TurnPrompt
from hpcrl.rollout.agents.requests import ApiError, ChatRequest, TextRequest
from hpcrl.rollout.episode import EpisodeLimits
from hpcrl.rollout.tasks import stable_hash
from hpcrl.spool.ids import make_request_id

SamplingSource = Literal["recipe", "program"]
"""The source of temperature, top_p and top_k; turns not sampled as in the recipe are recorded but not trained on."""


@dataclass(eq=False, kw_only=True)
class ProgramSession:
    """One attempt at an episode, as the calls of its program see it."""

    name: str
    """The episode's id and the number of the attempt; the ids of its requests start with it."""
    trajectory: str
    domain: str
    seed: int
    limits: EpisodeLimits
    recording: ConversationRecording
    newest_version: Callable[[], int]
    start_version: int
    sampling: SamplingSource = "recipe"
    trained_conversation: ConversationChoice = "longest"
    reward: float | None = None
    """The reward posted by the program."""
    is_stale: bool = False
    is_truncated: bool = False
    """True once a call was refused for lack of context or turns: an episode that ends well is then truncated."""
    fault: str = ""
    """The reason why no engine answered the last call; an answered call clears it."""
    stop_event: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the program is to be ended early."""
    calls: "set[asyncio.Task[Any]]" = field(default_factory=set)
    num_calls: int = 0

    def admit(self) -> None:
        """Admit a call and count it, or raise an ApiError."""
        self.check_staleness()
        if self.is_stale:
            raise ApiError(410, f"this episode is more than max_lag = {self.limits.max_lag} versions old", code="stale")
        if self.num_calls >= self.limits.max_turns:
            self.is_truncated = True
            raise ApiError(
                400, f"an episode may call the model {self.limits.max_turns} times at most", code="max_turns"
            )
        self.num_calls += 1

    def check_staleness(self) -> None:
        """End an episode that is too far behind, even during a call."""
        for turn in self.recording.turns[-1:]:
            self.start_version = min((self.start_version, *turn.completion.versions))
        if self.newest_version() - self.start_version > self.limits.max_lag:
            self.is_stale = True
            self.stop_event.set()

    def close(self) -> None:
        """Cancel the running calls."""
        for call in self.calls:
            call.cancel()

    def make_requests(
        self, api_request: ChatRequest | TextRequest, prompt: TurnPrompt, *, stop_token_ids: Sequence[int]
    ) -> list[GenerateRequest]:
        """Make the engine requests, one for each choice; raise ApiError if the prompt leaves no room for an answer."""
        token_ids, stops = prompt.token_ids(), [*stop_token_ids, *(api_request.stop_token_ids or ())]
        return [
            self._make_request(api_request, token_ids, choice=choice, stops=stops)
            for choice in range(api_request.n or 1)
        ]

    def _make_request(
        self, api_request: ChatRequest | TextRequest, token_ids: list[int], *, choice: int, stops: list[int]
    ) -> GenerateRequest:
        limits = self.limits
        room = limits.context_length - len(token_ids)
        if room < 1:
            self.is_truncated = True
            most = limits.context_length
            why = f"the prompt has {len(token_ids)} tokens, this model's maximum context length is {most}: shorten it"
            raise ApiError(400, why, code="context_length_exceeded", param="messages")
        num_requested = (
            getattr(api_request, "max_completion_tokens", None) or api_request.max_tokens or limits.max_new_tokens
        )
        request = GenerateRequest(
            request_id=make_request_id(self.name, f"{self.num_calls}.{choice}"),
            token_ids=token_ids,
            max_new_tokens=min(num_requested, limits.max_new_tokens, room),
            temperature=limits.temperature,
            seed=stable_hash(self.seed, self.name, self.num_calls, choice, api_request.seed, bits=63),
            stop_token_ids=stops,
            top_logprobs=_requested_top_logprobs(api_request),
            trajectory=self.trajectory,
            domain=self.domain,
        )
        return (
            request if self.sampling == "recipe" else self._with_program_sampling(request, api_request, choice=choice)
        )

    def _with_program_sampling(
        self, request: GenerateRequest, api_request: ChatRequest | TextRequest, *, choice: int
    ) -> GenerateRequest:
        return msgspec.structs.replace(
            request,
            temperature=self.limits.temperature if api_request.temperature is None else api_request.temperature,
            top_p=api_request.top_p or 1.0,
            top_k=max(api_request.top_k or 0, 0),
            seed=request.seed if api_request.seed is None else stable_hash(api_request.seed, choice, bits=63),
        )

    def can_train(self, request: GenerateRequest) -> bool:
        """Return whether the request is sampled as training assumes."""
        return (request.temperature, request.top_p, request.top_k) == (self.limits.temperature, 1.0, 0)


def _requested_top_logprobs(api_request: ChatRequest | TextRequest) -> int:
    if isinstance(api_request, TextRequest):
        return api_request.logprobs or 0
    if api_request.top_logprobs and not api_request.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs = true", param="top_logprobs", code="invalid_value")
    return api_request.top_logprobs or 0
