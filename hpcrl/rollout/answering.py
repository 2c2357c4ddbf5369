"""An answer in the making: pieces of text that are certain, cut at the texts that a client wants it to stop at.

Draft     takes ids as they come, gives text; what may be the beginning of a stop is held back
pieces    says a turn and gives a Draft its pieces; closing it ends the request in the engine
"""

import contextlib
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from functools import cached_property

import msgspec

from hpcrl.engines.base import Completion, GenerateRequest, Part, as_part, joined
from hpcrl.engines.template import Template
from hpcrl.rollout.saying import Policy, tell


class Draft:
    """One choice of an answer."""

    def __init__(self, template: Template, *, stops: Sequence[str], silent_ids: Collection[int]) -> None:
        self.text = ""
        """All that the client is to see of the answer so far."""
        self.finish_reason: str | None = None
        self._template = template
        self.stops = stops
        self._silent_ids = frozenset(silent_ids)
        self.parts: list[Part] = []
        self._spelled = ""
        self._searched = 0

    @cached_property
    def _spell(self) -> Callable[[Sequence[int]], str]:
        return self._template.spell()

    @property
    def completion(self) -> Completion:
        """What was said, up to and with the token that completed a stop."""
        completion = joined(self.parts)
        finish = "stop" if self.finish_reason == "stop" else completion.finish_reason
        return msgspec.structs.replace(completion, finish_reason=finish)

    def take_whole(self, completion: Completion) -> None:
        """A whole answer that nothing has to be looked for in: spelled at once."""
        self.parts.append(as_part(completion))
        self.text = self._spelled = self._template.decode(self._audible(completion.token_ids))
        self.finish_reason = "stop" if completion.finish_reason == "stop" else "length"

    def take(self, part: Part) -> Part:
        """The next piece, cut if a stop was said in it; `text` has grown by what is certain now."""
        for place, token in enumerate(part.token_ids):
            self._spelled += self._spell(self._audible([token]))
            if (end := self._stop_at()) is not None:
                part = _head(part, place + 1)
                self.parts.append(part)
                self.text, self.finish_reason = self._spelled[:end], "stop"
                return part
        self.parts.append(part)
        if part.finish_reason is not None:
            self.finish_reason = "stop" if part.finish_reason == "stop" else "length"
            self._spell_the_end()
        else:
            self.text = self._spelled[: len(self._spelled) - self._held_back()]
        return part

    def _spell_the_end(self) -> None:
        """All of it, also half a character; an answer cut in one is told as a whole decoder would."""
        whole = self._template.decode(self._audible(joined(self.parts).token_ids))
        self.text = self._spelled = whole if whole.startswith(self._spelled) else self._spelled
        if (end := self._stop_at()) is not None:
            self.text, self.finish_reason = self._spelled[:end], "stop"

    def _audible(self, token_ids: Sequence[int]) -> list[int]:
        return [token for token in token_ids if token not in self._silent_ids]

    def _stop_at(self) -> int | None:
        """Where the first stop begins, if one has been said."""
        found = [self._spelled.find(stop, max(0, self._searched - len(stop))) for stop in self.stops]
        self._searched = len(self._spelled)
        return min((place for place in found if place >= 0), default=None)

    def _held_back(self) -> int:
        return max((_overlap(self._spelled, stop) for stop in self.stops), default=0)


async def pieces(policy: Policy, request: GenerateRequest, draft: Draft) -> AsyncGenerator[Part, None]:
    """Say the turn into the draft; gives the pieces that belong to the answer."""
    async with contextlib.aclosing(tell(policy, request)) as told:
        async for part in told:
            yield draft.take(part)
            if draft.finish_reason is not None:
                return


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of the text that may begin the stop."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)


def _head(part: Part, num: int) -> Part:
    """The first `num` tokens of a piece, as the last piece of an answer that was stopped."""
    return msgspec.structs.replace(
        part,
        token_ids=part.token_ids[:num],
        logprobs=part.logprobs[:num],
        versions=part.versions[:num],
        top=part.top[:num],
        finish_reason="stop",
    )
