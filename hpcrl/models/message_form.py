"""The form in which a chat template reads messages; found out by rendering, since templates do not declare it. Pure.

MessageForm            the form, and messages brought into it
MessageForm.adapt      a client's conversation as the template accepts it
MessageForm.stub       a placeholder with the structure of an answer
MessageForm.adapt_tools  the same of its tools
MessageForm.add_tools   a conversation with a text about tools that the template does not render
find_message_form      try out what a template renders
renders_tools, renders_bare_tools  whether it describes tools, also those without a description
ConversationExcerpt     a short conversation with the structure of a long one
make_excerpt, extend_excerpt  how it is made, and what it becomes with more messages
describe_message        the structure of a message
STUB_TEXT, STUB_THOUGHT  the placeholder's text and thought
has_thought, has_open_thought, THOUGHT_MARKS  whether generated text has a thought, or one cut off, and by which marks

Templates differ in the roles that they render and the order of them that they accept, in how often instructions may
occur, in tool-call arguments as objects or text, in the length of the ids of tool calls, in how many of them an answer
may have, in where they expect a thought, and in whether they describe tools, and write calls and results, at all.
"""

import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from hpcrl.errors import ConfigError
from hpcrl.models.call_form import PLAIN_CALL, CallForm

Message = Mapping[str, Any]
RenderMessages = Callable[[Sequence[Message]], str]
"""Renders messages as they are; raises ConfigError where the template refuses them."""
RenderTools = Callable[[Sequence[Message], Sequence[Any]], str]
"""Renders messages and tools; raises ConfigError like the other."""
STUB_TEXT, STUB_THOUGHT = "Stub-of-an-answer", "Stub-of-a-thought"
THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking")
THOUGHT_MARKS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("\u25c1think\u25b7", "\u25c1/think\u25b7"),
)
"""The marks that open and close a thought."""
THOUGHT_CHANNELS = ("<|channel|>analysis", "<|channel>thought")
"""The headers of messages that are thoughts."""
CALL_ID_LENGTH = 9
"""The length of the ids of tool calls that Mistral's templates require."""
_PROBES = ("First-probe", "Second-probe", "Third-probe")
InstructionsPlace = Literal["anywhere", "first", "in-user"]


class MessageForm(msgspec.Struct, frozen=True, kw_only=True):
    """The form of messages that a chat template renders."""

    instructions: InstructionsPlace = "anywhere"
    """The place of a system message: anywhere, only once and first, or as part of the first user message."""
    has_developer: bool = False
    """True if the role developer is rendered; else it becomes a system message."""
    has_text_arguments: bool = False
    """True if arguments of tool calls are joined as text, not rendered from an object."""
    has_null_content: bool = False
    """True if calls are written only where an answer's content is none, not where it is an empty text."""
    has_short_call_ids: bool = False
    """True if the ids of tool calls need a fixed length."""
    has_single_calls: bool = False
    """True if an answer may have one tool call only: several are written as answers with a call and its result each."""
    has_thought_fields: bool = False
    """True if a thought is a field of a message, not part of its content."""
    alternates: bool = False
    """True if the user and the model must take turns: neighbours of one role are joined."""
    has_calls: bool = True
    """True if the template writes tool calls; else they are part of the answer's text."""
    has_results: bool = True
    """True if it writes the results of tools; else they are the user's text."""
    has_tools: bool = True
    """True if the template describes the tools of a conversation to the model."""
    call_form: CallForm | None = None
    """The form in which the model writes a call, for a template that leaves tools or calls out; None if unknown."""
    needs_tool_descriptions: bool = False
    """True if the template refuses a tool without a description, which OpenAI's API allows."""

    def adapt(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages as the template accepts them, with nothing left out."""
        placed = self._place_instructions(messages)
        if not self.has_calls:
            placed = [self._write_calls(message) for message in placed]
        elif self.has_single_calls:
            placed = _split_calls(placed)
        if not self.has_results:
            placed = [_write_result(message) for message in placed]
        if self.alternates:
            placed = _join_neighbours(placed)
        return [self._adapt_fields(message) for message in placed]

    def keeps_calls(self, answer: Message) -> bool:
        """Return whether the tool calls of an answer are written as the model generated them, in one answer."""
        calls = answer.get("tool_calls") or ()
        return bool(calls) and self.has_calls and not (self.has_single_calls and len(calls) > 1)

    def stub(self, answer: Message, *, has_thought: bool) -> dict[str, Any]:
        """Return a message with the structure of `answer` and placeholders for what the model generated."""
        calls = [
            {
                "id": call.get("id", ""),
                "type": "function",
                "function": {"name": call["function"]["name"], "arguments": {}},
            }
            for call in answer.get("tool_calls") or ()
        ]
        message: dict[str, Any] = {"role": "assistant", "content": "" if calls else STUB_TEXT}
        if has_thought and self.has_thought_fields:
            message |= dict.fromkeys(THOUGHT_FIELDS, STUB_THOUGHT)
        elif has_thought:
            message["content"] = f"<think>\n{STUB_THOUGHT}\n</think>\n\n{message['content']}"
        return message | ({"tool_calls": calls} if calls else {})

    def adapt_tools(self, tools: Sequence[Any]) -> list[Any]:
        """Return the tools as the template accepts them."""
        if not self.needs_tool_descriptions:
            return list(tools)
        return [
            {**tool, "function": {"description": "", **tool["function"]}} if "function" in tool else tool
            for tool in tools
        ]

    def add_tools(self, messages: Sequence[Message], tools: Sequence[Any]) -> list[Message]:
        """Return the messages with a description of the tools in the first system message."""
        lines = [json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools]
        text = "\n".join(["You can call these functions, described in JSON:", *lines])
        if self.call_form:
            text += f"\nWrite a call in this form, with nothing else in its place:\n{self.call_form.text}"
        if messages and messages[0].get("role") in ("system", "developer"):
            first, *others = messages
            return [{**first, "content": f"{first.get('content') or ''}\n\n{text}"}, *others]
        return [{"role": "system", "content": text}, *messages]

    def _place_instructions(self, messages: Sequence[Message]) -> Sequence[Message]:
        if not self.has_developer:
            messages = [{**m, "role": "system"} if m.get("role") == "developer" else m for m in messages]
        places = [place for place, m in enumerate(messages) if m.get("role") in ("system", "developer")]
        if not places or self.instructions == "anywhere" or (self.instructions == "first" and places == [0]):
            return messages
        text = "\n\n".join(str(messages[place].get("content") or "") for place in places)
        others = [m for m in messages if m.get("role") not in ("system", "developer")]
        if self.instructions == "first":
            return [{"role": "system", "content": text}, *others]
        if not others or others[0].get("role") != "user":
            return [{"role": "user", "content": text}, *others]
        return [{**others[0], "content": f"{text}\n\n{others[0].get('content') or ''}"}, *others[1:]]

    def _write_calls(self, message: Message) -> Message:
        """Return a message with its tool calls in its text."""
        if not message.get("tool_calls"):
            return message
        form = self.call_form or PLAIN_CALL
        functions = [call["function"] for call in message["tool_calls"]]
        calls = [form.write(function["name"], function.get("arguments")) for function in functions]
        plain = {name: value for name, value in message.items() if name != "tool_calls"}
        return {**plain, "content": "\n".join(filter(None, [message.get("content"), *calls]))}

    def _adapt_fields(self, message: Message) -> Message:
        changes: dict[str, Any] = {}
        if message.get("tool_calls"):
            changes["tool_calls"] = [self._adapt_call(call) for call in message["tool_calls"]]
            if self.has_null_content and not message.get("content"):
                changes["content"] = None
        if self.has_short_call_ids and message.get("tool_call_id") is not None:
            changes["tool_call_id"] = _shorten_call_id(str(message["tool_call_id"]))
        if self.has_thought_fields:
            thought = next((message[name] for name in THOUGHT_FIELDS if isinstance(message.get(name), str)), None)
            if thought:
                changes |= dict.fromkeys(THOUGHT_FIELDS, thought)
        return {**message, **changes} if changes else message

    def _adapt_call(self, call: Mapping[str, Any]) -> Mapping[str, Any]:
        function = call["function"]
        if self.has_text_arguments and not isinstance(function.get("arguments"), str):
            function = {**function, "arguments": json.dumps(function.get("arguments") or {}, ensure_ascii=False)}
        if self.has_short_call_ids:
            return {**call, "id": _shorten_call_id(str(call.get("id", ""))), "function": function}
        return {**call, "function": function}


def _write_result(message: Message) -> Message:
    """Return the result of a tool as the user's text."""
    if message.get("role") != "tool":
        return message
    return {"role": "user", "content": f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"}


def _join_neighbours(messages: Sequence[Message]) -> list[Message]:
    """Return the messages in turns of the user and the model, the user first: what is missing between them is empty."""
    turns: list[Message] = []
    for message in messages:
        role = message.get("role")
        before = turns[-1].get("role") if turns else None
        if (
            role == before
            and role in ("user", "assistant")
            and not (turns[-1].get("tool_calls") or message.get("tool_calls"))
        ):
            texts = (str(one.get("content") or "") for one in (turns[-1], message))
            turns[-1] = {**turns[-1], **message, "content": "\n\n".join(filter(None, texts))}
            continue
        if before in (None, "system", "developer") and role in ("assistant", "tool"):
            turns.append({"role": "user", "content": ""})
        elif before == "tool" and role == "user":
            turns.append({"role": "assistant", "content": ""})
        turns.append(message)
    return turns if any(turn.get("role") == "user" for turn in turns) else [*turns, {"role": "user", "content": ""}]


def _split_calls(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with one tool call in each answer, followed by its result."""
    split: list[Message] = []
    rest = list(messages)[::-1]
    while rest:
        message = rest.pop()
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            split.append(message)
            continue
        results = []
        while rest and rest[-1].get("role") == "tool":
            results.append(rest.pop())
        for number, call in enumerate(calls):
            answer = message if number == 0 else {"role": message["role"], "content": ""}
            split.append({**answer, "tool_calls": [call]})
            if results:
                split.append(results.pop(_find_result(results, call)))
        split += results
    return split


def _find_result(results: Sequence[Message], call: Mapping[str, Any]) -> int:
    """Return the place of a call's result, which has its id; else that of the first one."""
    named = (
        place for place, result in enumerate(results) if call.get("id") and result.get("tool_call_id") == call["id"]
    )
    return next(named, 0)


def has_thought(text: str) -> bool:
    """Return whether generated text, with its special tokens, has a thought."""
    return any(mark in text for mark in (*itertools.chain.from_iterable(THOUGHT_MARKS), *THOUGHT_CHANNELS))


def has_open_thought(text: str) -> bool:
    """Return whether a thought in generated text was cut off: templates close it in the history, or leave it out."""
    return any(opening in text and closing not in text for opening, closing in THOUGHT_MARKS)


ConversationStructure = tuple[tuple[Hashable, ...], ...]
"""The facts that templates use about the messages of a conversation, besides their texts."""


@dataclass(eq=False)
class ConversationExcerpt:
    """A short conversation with the structure of a long one, which it keeps while that grows by more of the same."""

    messages: Sequence[Message]
    structure: ConversationStructure
    rendered: str | None = None
    """Its text up to where an answer starts, once it was rendered."""


def make_excerpt(messages: Sequence[Message]) -> ConversationExcerpt:
    """Make a short conversation with the structure of `messages`.

    A step is an answer with the messages after it. Of steps that differ only in their texts the first stays, and the
    last two stay in any case; so does everything before the first answer.
    """
    structure = tuple(map(describe_message, messages))
    places = _choose_places(structure)
    return ConversationExcerpt([messages[place] for place in places], tuple(structure[place] for place in places))


def extend_excerpt(
    excerpt: ConversationExcerpt, new: Sequence[Message], structure: ConversationStructure
) -> ConversationExcerpt:
    """Return the excerpt of a conversation that grew by messages of this structure: the same, if it can be."""
    described = (*excerpt.structure, *structure)
    places = _choose_places(described)
    kept = tuple(described[place] for place in places)
    if kept == excerpt.structure:
        return excerpt
    messages = [*excerpt.messages, *new]
    return ConversationExcerpt([messages[place] for place in places], kept)


@functools.lru_cache(maxsize=256)
def _choose_places(structure: ConversationStructure) -> tuple[int, ...]:
    """Return the places of the messages that an excerpt has."""
    starts = [place for place, (role, *_) in enumerate(structure) if role == "assistant"]
    steps = [range(start, end) for start, end in itertools.pairwise([*starts, len(structure)])]
    kinds = {tuple(structure[place] for place in step): step for step in reversed(steps)}
    kept = {step.start: step for step in (*kinds.values(), *steps[-2:])}
    head = range(starts[0] if starts else len(structure))
    return (*head, *itertools.chain.from_iterable(kept[start] for start in sorted(kept)))


def describe_message(message: Message) -> tuple[Hashable, ...]:
    """Return what templates ask about a message besides its text, which may start like the result of a tool."""
    content = message.get("content")
    text = content if isinstance(content, str) else ""
    thought = "</think>" in text or any(message.get(name) for name in THOUGHT_FIELDS)
    return message.get("role"), bool(content), len(message.get("tool_calls") or ()), thought, text.startswith("<")


def renders_tools(render: RenderTools) -> bool:
    """Return whether a template describes a conversation's tools, with a system message or without."""
    return _renders_tool(render, {"description": _PROBES[1]})


def renders_bare_tools(render: RenderTools) -> bool:
    """Return whether a template describes a tool that has no description itself."""
    return _renders_tool(render, {})


def _renders_tool(render: RenderTools, described: Message) -> bool:
    system, user = {"role": "system", "content": "A rule."}, {"role": "user", "content": "A question."}
    function = {"name": _PROBES[0], **described, "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": function}]
    return any(
        _renders(lambda sent: render(sent, tools), messages, _PROBES[0]) for messages in ([user], [system, user])
    )


def find_message_form(render: RenderMessages) -> MessageForm:
    """Find out by rendering what a template accepts; where nothing works, the form is the plain one."""
    instructions, alternates = _find_instructions(render), _alternates(render)
    form = MessageForm(
        instructions="first" if alternates and instructions == "anywhere" else instructions,
        has_developer=_has_developer(render),
        alternates=alternates,
    )
    for shape in _call_shapes(form):
        if _renders(render, shape.adapt([*_tool_conversation(), _ANSWER, _QUESTION]), *_PROBES[1:]):
            form = msgspec.structs.replace(shape, has_single_calls=shape.has_calls and _has_single_calls(render, shape))
            break
    return msgspec.structs.replace(form, has_thought_fields=_has_thought_fields(render, form))


def _alternates(render: RenderMessages) -> bool:
    first, second = ({"role": "user", "content": text} for text in _PROBES[:2])
    return not _renders(render, [first, second], *_PROBES[:2]) and _renders(
        render, [first, _ANSWER, second], *_PROBES[:2]
    )


def _find_instructions(render: RenderMessages) -> InstructionsPlace:
    first, second = ({"role": "system", "content": text} for text in _PROBES[:2])
    if not _renders(render, [first, _QUESTION], _PROBES[0]):
        return "in-user"
    orders = ([first, second, _QUESTION], [first, _QUESTION, _ANSWER, second, _QUESTION])
    return "anywhere" if all(_renders(render, order, *_PROBES[:2]) for order in orders) else "first"


def _has_developer(render: RenderMessages) -> bool:
    system, developer = {"role": "system", "content": _PROBES[0]}, {"role": "developer", "content": _PROBES[1]}
    return all(
        _renders(render, [*before, developer, _QUESTION], *texts)
        for before, texts in (([], _PROBES[1:2]), ([system], _PROBES[:2]))
    )


def _call_shapes(form: MessageForm) -> Iterator[MessageForm]:
    """Yield the forms of tool calls and results, what is written as text last."""
    for has_results, has_calls, is_null, is_short, is_text in itertools.product(
        *[(True, False)] * 2, *[(False, True)] * 3
    ):
        yield msgspec.structs.replace(
            form,
            has_results=has_results,
            has_calls=has_calls,
            has_null_content=is_null,
            has_short_call_ids=is_short,
            has_text_arguments=is_text,
        )


def _has_single_calls(render: RenderMessages, form: MessageForm) -> bool:
    """Return whether a template writes two calls only if one comes after the other, not in one answer."""
    user, answer, result = _tool_conversation()
    texts = [f"{_PROBES[2]}-{number}" for number in range(2)]
    calls = [
        {"id": text, "type": "function", "function": {"name": _PROBES[0], "arguments": {"x": text}}} for text in texts
    ]
    messages = [user, {**answer, "tool_calls": calls}, *({**result, "tool_call_id": text} for text in texts)]
    if _renders(render, form.adapt(messages), *texts):
        return False
    return _renders(render, msgspec.structs.replace(form, has_single_calls=True).adapt(messages), *texts)


def _has_thought_fields(render: RenderMessages, form: MessageForm) -> bool:
    form = msgspec.structs.replace(form, has_thought_fields=True)
    user, *_, tool = _tool_conversation()
    answer, call = (form.stub(message, has_thought=True) for message in (_ANSWER, _tool_conversation()[1]))
    return any(
        _renders(render, form.adapt(messages), STUB_THOUGHT) for messages in ([user, call, tool], [user, answer])
    )


_QUESTION, _ANSWER = {"role": "user", "content": "A question."}, {"role": "assistant", "content": "An answer."}


def _tool_conversation() -> list[Message]:
    """Return a conversation that has the second probe in the result of a tool, the third in its arguments."""
    function = {"name": _PROBES[0], "arguments": {"x": _PROBES[2]}}
    call = {"id": "call_of_a_probe", "type": "function", "function": function}
    return [
        _QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": _PROBES[1], "name": _PROBES[0], "tool_call_id": "call_of_a_probe"},
    ]


def _renders(render: RenderMessages, messages: Sequence[Message], *texts: str) -> bool:
    try:
        rendered = render(messages)
    except ConfigError:
        return False
    return all(text in rendered for text in texts)


def _shorten_call_id(name: str) -> str:
    if len(name) == CALL_ID_LENGTH and name.isalnum():
        return name
    return hashlib.blake2b(name.encode(), digest_size=8).hexdigest()[:CALL_ID_LENGTH]
