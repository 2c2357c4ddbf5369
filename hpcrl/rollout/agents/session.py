"""Session of one agent program: its limits, its engine requests and their recording.

ProgramSession   one attempt at an episode
"""

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from hpcrl.engines.base import GenerateRequest, OutputStructure
from hpcrl.envs.base import ConversationChoice, SamplingSource
from hpcrl.rollout.agents.recording import ConversationRecording, TurnPrompt
from hpcrl.rollout.agents.requests import ApiError, MessageMemory, ModelCall, SamplingFields
from hpcrl.rollout.agents.responses_form import ResponseMemory
from hpcrl.rollout.agents.shared_sequence import IdListCache
from hpcrl.rollout.episode import EpisodeLimits
from hpcrl.rollout.tasks import stable_hash
from hpcrl.spool.ids import make_request_id
from hpcrl.spool.outcome import OUTCOME_MAX_TURNS, OUTCOME_OVERFLOW, is_too_old

MAX_IGNORED_FIELDS, MAX_FIELD_CHARS = 32, 64
"""The most names of ignored fields that an episode remembers, and how much of each."""
CANCEL_TIMEOUT_S = 5.0
"""The time that cancelled calls have to end."""


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
    """The newest version until a call is answered, then the oldest that an answer has."""
    needed_version: int = 0
    """The version that the first calls wait for."""
    sampling: SamplingSource = "recipe"
    trained_conversations: ConversationChoice = "all"
    reward_key: str = field(default_factory=partial(secrets.token_urlsafe, 32))
    """The key that posts the reward; the program is given it only if its reward is to be posted."""
    reward: float | None = None
    """The reward posted by the program."""
    is_stale: bool = False
    limit: str = ""
    """The outcome of an episode that ends after a call was refused for lack of turns or context. A later answer clears
    the latter: the program has shortened its conversation."""
    refusal: str = ""
    """The reason why the last call was refused, if one was."""
    fault: str = ""
    """The reason why no engine answered the last call; an answered call clears it."""
    template_fault: str = ""
    """The reason why the chat template was stopped: what this program sends would stop all episodes again."""
    stop_event: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the program is to be ended early."""
    calls: "set[asyncio.Task[Any]]" = field(default_factory=set)
    num_calls: int = 0
    """The calls that the model answers or has answered; one that is refused, or that no engine answers, is not one."""
    ignored_fields: list[str] = field(default_factory=list)
    """The names of fields that its requests had and that were ignored, each once."""
    memory: MessageMemory = field(default_factory=MessageMemory)
    id_lists: IdListCache = field(default_factory=partial(IdListCache, max_ids=0))
    """The prompts that were sent last, of all episodes of a worker."""
    large_body: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a large request is read: a program has one of them at a time."""
    structure_turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a schema is checked: one program's are checked one after the other, and others' between them."""
    responses: ResponseMemory = field(default_factory=ResponseMemory)

    _num_admitted: int = field(default=0, init=False)
    _num_checked: int = field(default=0, init=False)
    """The turns whose versions are in `start_version`."""

    def admit(self) -> int:
        """Admit a call and return its number, from 1 on, or raise an ApiError."""
        self.check_admission()
        self.num_calls += 1
        self._num_admitted += 1
        return self._num_admitted

    def note_answer(self) -> None:
        """Note that a call was answered, at least in part."""
        self.fault = ""
        if self.limit == OUTCOME_OVERFLOW:
            self.limit = ""

    def end_for_template(self, reason: str) -> None:
        """End the program, which sent a conversation that the chat template cannot render."""
        self.template_fault = reason
        self.stop_event.set()

    def check_admission(self) -> None:
        """Raise an ApiError if the episode may not call the model again."""
        self.check_staleness()
        if self.is_stale:
            raise ApiError(410, f"this episode is more than max_lag = {self.limits.max_lag} versions old", code="stale")
        if self.template_fault:
            raise ApiError(410, self.template_fault, code="chat_template")
        if self.num_calls >= self.limits.max_turns:
            self.limit = OUTCOME_MAX_TURNS
            raise ApiError(
                400, f"an episode may call the model {self.limits.max_turns} times at most", code="max_turns"
            )

    def check_staleness(self) -> None:
        """End an episode that is too far behind, even during a call."""
        unseen = self.recording.turns[self._num_checked :]
        earlier = [self.start_version] if self._num_checked else []
        versions = (version for turn in unseen for version in turn.completion.versions)
        self.start_version = min([*earlier, *versions], default=self.start_version)
        self._num_checked = len(self.recording.turns)
        if is_too_old(self.start_version, newest=self.newest_version(), max_lag=self.limits.max_lag):
            self.is_stale = True
            self.stop_event.set()

    @contextlib.contextmanager
    def note_call(self) -> Iterator[None]:
        """Note that this task is a call of the program, so that closing the session ends it."""
        task = asyncio.current_task()
        assert task is not None
        self.calls.add(task)
        try:
            yield
        finally:
            self.calls.discard(task)

    async def close(self) -> None:
        """Cancel the running calls, and wait until what they generated is recorded."""
        calls = list(self.calls)
        for call in calls:
            call.cancel()
        if calls:
            await asyncio.wait(calls, timeout=CANCEL_TIMEOUT_S)

    def note_ignored_fields(self, names: Sequence[str]) -> list[str]:
        """Remember the fields of a request that were ignored; return those that are new in this episode."""
        room = MAX_IGNORED_FIELDS - len(self.ignored_fields)
        new = [
            name for name in dict.fromkeys(name[:MAX_FIELD_CHARS] for name in names) if name not in self.ignored_fields
        ]
        self.ignored_fields += new[:room]
        return new[:room]

    def check_length(self, num_tokens: int, *, param: str) -> None:
        """Refuse a prompt that surely has this number of tokens, if that leaves no room for an answer."""
        most = self.limits.context_length
        if num_tokens >= most:
            self.limit = OUTCOME_OVERFLOW
            why = f"the prompt has at least {num_tokens} tokens, the maximum context length is {most}: shorten it"
            raise ApiError(400, why, code="context_length_exceeded", param=param)

    def make_requests(
        self,
        call: ModelCall,
        prompt: TurnPrompt,
        *,
        stop_token_ids: Sequence[int],
        structure: OutputStructure | None,
    ) -> list[GenerateRequest]:
        """Make the engine requests, one for each choice, of a call, and admit it, or raise an ApiError."""
        token_ids, limits, asked = self.id_lists.read(prompt.ids), self.limits, call.max_tokens or 0
        self.check_length(len(token_ids), param=call.prompt_field)
        if self.sampling == "program":
            self._check_program_sampling(call.sampling)
        number = self.admit()
        room = limits.context_length - len(token_ids)
        request = GenerateRequest(
            request_id=make_request_id(self.name, f"{number}.0"),
            token_ids=token_ids,
            max_new_tokens=min(asked if asked > 0 else limits.max_new_tokens, limits.max_new_tokens, room),
            temperature=limits.temperature,
            seed=self._choose_seed(call, number=number, choice=0),
            needs_seed=call.sampling.seed is not None,
            top_p=limits.top_p,
            stop_token_ids=[*stop_token_ids, *call.stop_token_ids],
            top_logprobs=call.top_logprobs,
            structure=structure,
            trajectory=self.trajectory,
            domain=self.domain,
            min_version=0 if self._num_checked else self.needed_version,
            experts_from=prompt.num_read if limits.records_experts else None,
        )
        if self.sampling == "program":
            request = self._with_program_sampling(request, call.sampling)
        others = [
            msgspec.structs.replace(
                request,
                request_id=make_request_id(self.name, f"{number}.{choice}"),
                seed=self._choose_seed(call, number=number, choice=choice),
            )
            for choice in range(1, call.num_choices)
        ]
        return [request, *others]

    def _choose_seed(self, call: ModelCall, *, number: int, choice: int) -> int:
        asked = call.sampling.seed
        if self.sampling == "program" and asked is not None:
            return stable_hash(asked, choice, bits=63)
        return stable_hash(self.seed, self.name, number, choice, asked, bits=63)

    def _check_program_sampling(self, sampling: SamplingFields) -> None:
        sampling.check_ranges()
        for name in sampling.unsupported_fields():
            why = f'{name} = {getattr(sampling, name)}: engines cannot do it; leave it out, or use sampling = "recipe"'
            raise ApiError(400, why, code="unsupported_parameter", param=name)

    def _with_program_sampling(self, request: GenerateRequest, sampling: SamplingFields) -> GenerateRequest:
        return msgspec.structs.replace(
            request,
            temperature=self.limits.temperature if sampling.temperature is None else sampling.temperature,
            top_p=sampling.top_p or self.limits.top_p,
            top_k=1 if sampling.top_p == 0 else max(int(sampling.top_k or 0), 0),
        )

    def can_train(self, request: GenerateRequest) -> bool:
        """Return whether the request is sampled as training assumes."""
        return (request.temperature, request.top_p, request.top_k) == (self.limits.temperature, self.limits.top_p, 0)
