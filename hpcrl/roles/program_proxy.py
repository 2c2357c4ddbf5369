"""The endpoint that an env worker opens for agent programs: how answers are read, and what is reported of requests.

make_proxy            makes the endpoint of one worker
choose_parser         chooses how answers to agent programs are read
make_thought_reader   makes what finds thoughts in answers to environments
RequestReport         reports what is not done as a request asks, once for each domain
MAX_REPORTED_NOTICES  a limit
"""

from collections.abc import Callable
from functools import cache

from hpcrl.campaign_dir.events import CampaignEvent, FaultReported, ParsersChosen
from hpcrl.models.chat_template import ChatTemplate
from hpcrl.roles.context import WorkerContext
from hpcrl.rollout.agents.answer_parser import AnswerParser, add_call_form, choose_parsers, make_answer_reader
from hpcrl.rollout.agents.reasoning_parsers import ReasoningParser
from hpcrl.rollout.agents.server import ModelProxy
from hpcrl.rollout.agents.session import ProgramSession
from hpcrl.rollout.thoughts import AnswerReader
from hpcrl.rollout.turn import StreamingGenerator

MAX_REPORTED_NOTICES = 256
"""The most notices about requests that a worker reports."""


def make_proxy(context: WorkerContext, policy: StreamingGenerator, *, template: ChatTemplate) -> ModelProxy:
    """Make the endpoint at which `policy` serves the agent programs of a worker."""
    parser = choose_parser(context, template)
    return ModelProxy(
        policy,
        template=add_call_form(template, context.recipe.engine),
        parser=parser,
        aliases=context.recipe.rollout.model_aliases,
        report=RequestReport(context.events.emit).report,
    )


def choose_parser(context: WorkerContext, template: ChatTemplate) -> AnswerParser:
    """Choose how answers are read; one worker reports it."""
    choice = choose_parsers(template.text, context.recipe.engine)
    if context.index == 0:
        context.events.emit(
            ParsersChosen(
                tool_parser=choice.tool_parser, reasoning_parser=choice.reasoning_parser, reason=choice.reason
            )
        )
    return AnswerParser.from_choice(choice, template, context.campaign.model)


def make_thought_reader(context: WorkerContext, template: ChatTemplate) -> AnswerReader:
    """Make what finds thoughts, for environments that leave them out of later prompts; it loads when first used."""

    @cache
    def load_parser() -> ReasoningParser:
        choice = choose_parsers(template.text, context.recipe.engine)._replace(tool_parser="none")
        return AnswerParser.from_choice(choice, template, context.campaign.model).reasoning

    return make_answer_reader(template, load_parser)


class RequestReport:
    """Reports what programs send and what becomes of it, each notice once for its domain."""

    def __init__(self, emit: Callable[[CampaignEvent], None]) -> None:
        self._emit = emit
        self._known: set[tuple[str, str]] = set()

    def report(self, session: ProgramSession, notice: str) -> None:
        """Report a notice, unless that is done or too many are reported already."""
        if (session.domain, notice) in self._known or len(self._known) >= MAX_REPORTED_NOTICES:
            return
        self._known.add((session.domain, notice))
        detail = f"programs of domain {session.domain!r} send {notice}"
        self._emit(FaultReported(what="request", detail=detail, id=session.trajectory, domain=session.domain))
