"""The forms in which families of models write tool calls, by name: TOOL_PARSERS.

"hermes"       <tool_call>{"name": ..., "arguments": {...}}</tool_call>        Hermes, Qwen2.5, Qwen3
"qwen3-coder"  <tool_call><function=NAME><parameter=KEY>VALUE</parameter>...   Qwen3-Coder, Qwen3.5
"glm"          <tool_call>NAME<arg_key>K</arg_key><arg_value>V</arg_value>...  GLM-4.5 and later
"deepseek"     special tokens around NAME and JSON                             DeepSeek-V3, R1, V3.1
"mistral"      [TOOL_CALLS][{...}], or [TOOL_CALLS]NAME[ARGS]{...}             Mistral, Magistral
"gpt-oss"      a message to functions.NAME                                     gpt-oss
"llama"        {"name": ..., "parameters": {...}}, or <|python_tag|>           Llama-3.1, 3.2, 3.3
"pythonic"     [NAME(key=value), ...]                                          Llama-4
"gemma"        ```tool_code with Python calls; call:NAME{key:value}            Gemma-3, FunctionGemma, Gemma-4
"phi"          <|tool_call|>{...}<|/tool_call|>, or functools[{...}]           Phi-4-mini
"none"         no calls: all text is content

CALL_FORMS     a call in each of them, as it is described to a model whose template does not
GEMMA_CALLS    the marks of Gemma's newer forms
list_types     the types that the schema of an argument allows
deepseek_mark  a special token of DeepSeek
JsonScanner    finds values of JSON in a text that grows
TextParser, LlamaParser, PythonicParser  the families that no pair of marks describes

These are facts of the models' own templates and documents. Arguments that are written without quotes are converted to
the types that the tool's schema names.
"""

import ast
import json
import re
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from hpcrl.models.call_form import PLAIN_CALL, CallForm
from hpcrl.rollout.agents.reasoning_parsers import HARMONY_ENDS, HARMONY_MARKS
from hpcrl.rollout.agents.tool_parsers import (
    AnswerPiece,
    BlockParser,
    ContentSpacer,
    ContentText,
    PlainReader,
    TextReader,
    ToolCall,
    ToolParser,
    ToolSchemas,
    decode_json,
    make_call,
    make_json_call,
)

MAX_PYTHON_CHARS = 1 << 17
"""The longest text that is parsed as Python: its syntax tree takes a hundred times as much memory."""
MAX_HEAD_CHARS = 96
"""The characters after which text that starts like a call must have named a function, or is content."""


def _all_calls(calls: "list[ToolCall | None]") -> list[ToolCall] | None:
    """Return the calls, or None if there is none or one of them is malformed."""
    good = [call for call in calls if call is not None]
    return good if good and len(good) == len(calls) else None


# ---- JSON between marks


def _parse_hermes(block: str, _: ToolSchemas) -> list[ToolCall] | None:
    return _all_calls([make_json_call(decode_json(block.removeprefix("<tool_call>").removesuffix("</tool_call>")))])


def deepseek_mark(words: str) -> str:
    """Return the special token with these words, between its own bars and with its own spaces."""
    return f"<\uff5c{words}\uff5c>".replace(" ", "\u2581")


CALL_START, _CALL_SEPARATOR, _CALL_END = map(deepseek_mark, ("tool call begin", "tool sep", "tool call end"))
_DEEPSEEK_FRAMES = (deepseek_mark("tool calls begin"), deepseek_mark("tool calls end"))


def _parse_deepseek(block: str, _: ToolSchemas) -> list[ToolCall] | None:
    body = block.removeprefix(CALL_START).removesuffix(_CALL_END)
    name, _mark, arguments = body.partition(_CALL_SEPARATOR)
    if name.strip() == "function" and not arguments.lstrip().startswith("{"):  # V3 and R1: a type, and a fence
        name, _line, arguments = arguments.partition("\n")
        arguments = arguments.strip().removeprefix("```json").removesuffix("```")
    return _all_calls([make_call(name, decode_json(arguments))])


def _parse_mistral(block: str, _: ToolSchemas) -> list[ToolCall] | None:
    body = block.removeprefix("[TOOL_CALLS]").strip()
    if body.startswith("["):
        return _parse_call_list(body)
    name, mark, arguments = body.partition("[ARGS]")
    if not mark:
        name, mark, arguments = body.partition("{")
        arguments = mark + arguments
    return _all_calls([make_call(name.partition("[CALL_ID]")[0], decode_json(arguments))])


def _parse_phi(block: str, _: ToolSchemas) -> list[ToolCall] | None:
    body = block.removeprefix("functools").removeprefix("<|tool_call|>").removesuffix("<|/tool_call|>")
    return _parse_call_list(body)


def _parse_call_list(text: str) -> list[ToolCall] | None:
    """Return the calls of a list, or the only call."""
    values = decode_json(text)
    return _all_calls([make_json_call(value) for value in (values if isinstance(values, list) else [values])])


_RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")


def _parse_harmony(block: str, _: ToolSchemas) -> list[ToolCall] | None:
    """Parse one message; the reasoning parser has left only those that go to a recipient."""
    header, _mark, body = block.partition("<|message|>")
    recipient = _RECIPIENT.search(header)
    for closing in HARMONY_ENDS:
        body = body.removesuffix(closing)
    return None if recipient is None else _all_calls([make_call(recipient[1], decode_json(body))])


# ---- arguments without quotes


def _parse_qwen_coder(block: str, tools: ToolSchemas) -> list[ToolCall] | None:
    _head, opening, body = block.partition("<function=")
    body, closing, _tail = body.rpartition("</function>")
    if not opening or not closing:
        return None
    name, _mark, body = body.partition(">")
    schemas, arguments = _find_schemas(name.strip(), tools), {}
    *pieces, rest = body.split("</parameter>")
    for piece in pieces:
        before, opening, parameter = piece.partition("<parameter=")
        key, closing, value = parameter.partition(">")
        if before.strip() or not opening or not closing:
            return None
        value = value.removeprefix("\n").removesuffix("\n")
        arguments[key.strip()] = _convert_argument(value, schemas.get(key.strip()))
    return None if rest.strip() else _all_calls([make_call(name, arguments)])


def _parse_glm(block: str, tools: ToolSchemas) -> list[ToolCall] | None:
    if not block.endswith("</tool_call>"):
        return None
    body = block.removeprefix("<tool_call>").removesuffix("</tool_call>")
    name, mark, body = body.partition("<arg_key>")
    schemas, arguments = _find_schemas(name.strip(), tools), {}
    *pieces, rest = (mark + body).split("</arg_value>")
    for piece in pieces:
        before, opening, pair = piece.partition("<arg_key>")
        key, closing, value = pair.partition("</arg_key>")
        between, value_mark, value = value.partition("<arg_value>")
        if before.strip() or between.strip() or not (opening and closing and value_mark):
            return None
        arguments[key.strip()] = _convert_argument(value, schemas.get(key.strip()))
    return None if rest.strip() else _all_calls([make_call(name, arguments)])


def _find_schemas(name: str, tools: ToolSchemas) -> Mapping[str, Any]:
    """Return the schemas of a tool's parameters by name; none if the request does not name them."""
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if isinstance(function, dict) and function.get("name") == name:
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, dict) else None
            return properties if isinstance(properties, dict) else {}
    return {}


_PYTHON_NAMES = {"True": True, "False": False, "None": None}


def _convert_argument(text: str, schema: Any) -> Any:
    """Convert an argument to a type of its schema; text stays where a string may stand, or where nothing else fits."""
    kinds = list_types(schema)
    if not isinstance(schema, dict) or kinds == {"string"}:
        return text
    stripped = text.strip()
    value = _PYTHON_NAMES[stripped] if stripped in _PYTHON_NAMES else decode_json(stripped)
    if isinstance(value, str) or (value is None and stripped not in ("null", "None")):
        return text
    return text if kinds and not _type_names(value) & kinds else value


def list_types(schema: Any) -> set[str]:
    """Return the names of the types that a schema allows; none if it names none."""
    if not isinstance(schema, dict):
        return set()
    choices = [schema, *_as_list(schema.get("anyOf")), *_as_list(schema.get("oneOf"))]
    named = [kind for one in choices if isinstance(one, dict) for kind in _as_list(one.get("type"))]
    values = _as_list(schema.get("enum"))
    if not named and values:
        return set().union(*map(_type_names, values))
    return {kind for kind in named if isinstance(kind, str)}


def _as_list(value: Any) -> list[Any]:
    """Return a list as it is, nothing for None, and anything else as the only item."""
    return value if isinstance(value, list) else [] if value is None else [value]


def _type_names(value: Any) -> set[str]:
    """Return the names that JSON Schema has for the type of a value."""
    match value:
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number"}
        case str():
            return {"string"}
        case list():
            return {"array"}
        case dict():
            return {"object"}
        case _:
            return {"null"}


# ---- Python calls


def _parse_python(text: str) -> list[ToolCall] | None:
    """Return the calls that a text of Python is: `[f(a=1), g()]`, or one a line."""
    if len(text) > MAX_PYTHON_CHARS:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # unknown escapes in the model's strings
            statements = ast.parse(text.strip()).body
        nodes = [node for statement in statements for node in _list_expressions(statement)]
        return _all_calls([_convert_node(node) for node in nodes])
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _list_expressions(statement: ast.stmt) -> list[ast.expr]:
    if not isinstance(statement, ast.Expr):
        raise ValueError(statement)
    value = statement.value
    return value.elts if isinstance(value, ast.List | ast.Tuple) else [value]


def _convert_node(node: ast.expr) -> ToolCall | None:
    if not isinstance(node, ast.Call):
        return None
    match node:
        case ast.Call(func=ast.Name(id="print"), args=[ast.Call() as inner], keywords=[]):
            return _convert_node(inner)
        case ast.Call(func=func, args=[], keywords=keywords) if all(one.arg for one in keywords):
            return make_call(_join_name(func), {str(one.arg): _evaluate(one.value) for one in keywords})
        case _:
            return None


def _join_name(node: ast.expr) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        raise ValueError(node)
    return ".".join([node.id, *reversed(parts)])


_NAMED_VALUES = {"true": True, "false": False, "null": None}


def _evaluate(node: ast.expr) -> Any:
    """Return the value of a literal that JSON has too; ValueError if it has not."""
    match node:
        case ast.Constant(value=str() | bool() | int() | float() | None):
            return node.value
        case ast.Name(id=name) if name in _NAMED_VALUES:
            return _NAMED_VALUES[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_evaluate(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            pairs = zip(keys, values, strict=True)
            return {_evaluate_key(key): _evaluate(value) for key, value in pairs}
        case _:
            raise ValueError(node)


def _evaluate_key(node: ast.expr | None) -> str:
    match node:
        case ast.Constant(value=str(key)):
            return key
        case _:
            raise ValueError(node)


# ---- Gemma


_BARE_KEY = re.compile(r'("(?:[^"\\]|\\.)*")|([{,]\s*)([A-Za-z_][\w.-]*)(?=\s*:)')
"""A key without quotes; group 1 is a string of JSON, which stays as it is."""


def _parse_gemma(block: str, _: ToolSchemas) -> list[ToolCall] | None:
    if block.startswith("```"):
        return _parse_python(block.removeprefix("```tool_code\n").removesuffix("\n```"))
    for opening, closing, quote in GEMMA_CALLS:
        if block.startswith(opening):
            head, mark, body = block.removeprefix(opening).removesuffix(closing).partition("{")
            return _all_calls([make_call(head.strip().removeprefix("call:"), _decode_gemma(mark + body, quote))])
    return None


def _decode_gemma(text: str, quote: str) -> Any:
    """Decode an object whose keys have no quotes and whose strings have `quote` on both sides."""
    between = text.split(quote)
    parts = [json.dumps(part) if index % 2 else _BARE_KEY.sub(_quote_key, part) for index, part in enumerate(between)]
    return decode_json("".join(parts)) if len(between) % 2 else None


def _quote_key(found: re.Match[str]) -> str:
    return found[1] or f'{found[2]}"{found[3]}"'


GEMMA_CALLS = (
    ("<|tool_call>", "<tool_call|>", '<|"|>'),
    ("<start_function_call>", "<end_function_call>", "<escape>"),
)
"""The marks that open and close a call of Gemma-4 and of FunctionGemma, and the one around a string."""


# ---- calls without marks


class JsonScanner:
    """Find where a JSON object ends in a growing text."""

    _TOKEN = re.compile(r'["\\{}\[\]]')

    def __init__(self) -> None:
        self._depth = 0
        self._is_text = self._is_escaped = False

    def find_end(self, text: str, position: int) -> int | None:
        """Return the position after the object, or None if it is open; `position` is where the last call ended."""
        if self._is_escaped and position < len(text):
            position, self._is_escaped = position + 1, False
        while (found := self._TOKEN.search(text, position)) is not None:
            position, token = found.end(), found[0]
            if token == '"':
                self._is_text = not self._is_text
            elif token == "\\":
                if self._is_text and position == len(text):
                    self._is_escaped = True
                position += self._is_text
            elif not self._is_text:
                self._depth += 1 if token in "{[" else -1
                if self._depth <= 0:
                    return position
        return None


_JSON_HEAD = re.compile(r'\{\s*"(?:name|type|function|parameters|arguments)"')
_BUILTIN_CALL = re.compile(r"([A-Za-z_]\w*)\.call\(")
_PYTHON_TAG = "<|python_tag|>"


@dataclass(frozen=True)
class LlamaParser:
    """The form of Llama-3: objects in any text; after <|python_tag|> also `NAME.call(key=value)`."""

    marks: Collection[str] = (_PYTHON_TAG,)

    def make_reader(self, _: ToolSchemas) -> TextReader:
        return _LlamaReader()


class _LlamaReader:
    """The reader of LlamaParser."""

    _OPENING = re.compile(r"\{|" + re.escape(_PYTHON_TAG))
    _AFTER_CALL = re.compile(_OPENING.pattern + "|;")

    def __init__(self) -> None:
        self._content = ContentSpacer()
        self._tail = ""
        self._object: list[str] | None = None
        self._is_call_head = False
        self._scanner = JsonScanner()
        self._rest: list[str] | None = None

    def feed(self, text: str) -> list[AnswerPiece]:
        if self._rest is not None:
            self._rest.append(text)
            return []
        pieces: list[AnswerPiece] = []
        text, position = self._tail + text, 0
        self._tail = ""
        while position < len(text):
            if self._object is None:
                position = self._read_content(text, position, pieces)
                if self._rest is not None or self._object is None:
                    return pieces
            elif (end := self._scanner.find_end(text, position)) is None:
                self._object.append(text[position:])
                return pieces
            else:
                self._object.append(text[position:end])
                pieces += self._close_object()
                position = end
        return pieces

    def _read_content(self, text: str, position: int, pieces: list[AnswerPiece]) -> int:
        """Read up to the next object; return where it starts, or the end of the text."""
        while (found := self._find_opening(text, position)) is not None:
            pieces += self._content.add(text[position : found.start()])
            position = found.end()
            if found[0] == _PYTHON_TAG:
                self._rest = [text[found.start() :]]
                return len(text)
            if found[0] == "{":
                head = text[found.start() : found.start() + MAX_HEAD_CHARS]
                if _JSON_HEAD.match(head) is not None:
                    self._object, self._scanner = [], JsonScanner()
                    return found.start()
                if len(head) < MAX_HEAD_CHARS and _may_open(head):
                    self._tail = text[found.start() :]
                    return len(text)
            if not (found[0] == ";" and self._content.follows_call):
                pieces += self._content.add(found[0])
        num_held = next(
            (size for size in range(len(_PYTHON_TAG) - 1, 0, -1) if text.endswith(_PYTHON_TAG[:size], position)), 0
        )
        end = len(text) - num_held
        pieces += self._content.add(text[position:end])
        self._tail = text[end:]
        return len(text)

    def _find_opening(self, text: str, position: int) -> re.Match[str] | None:
        return (self._AFTER_CALL if self._content.follows_call else self._OPENING).search(text, position)

    def _close_object(self) -> list[AnswerPiece]:
        text, self._object = "".join(self._object or ()), None
        call = make_json_call(decode_json(text))
        if call is None:
            return self._content.add(text)
        self._content.skip_space()
        return [call]

    def finish(self) -> list[AnswerPiece]:
        rest = "".join([*(self._object or ()), *(self._rest or ()), self._tail])
        calls = None if self._rest is None else _parse_builtin(rest.removeprefix(_PYTHON_TAG).strip())
        self._object = self._rest = None
        self._tail = ""
        if calls is None:
            return [*self._content.add(rest), *self._content.finish()]
        self._content.skip_space()
        return list(calls)


_HEAD_PREFIX = re.compile(r'\{\s*(?:"[a-z]*)?')


def _may_open(head: str) -> bool:
    """Return whether more text could make this the start of a call's object."""
    return _HEAD_PREFIX.fullmatch(head) is not None


def _parse_builtin(text: str) -> list[ToolCall] | None:
    """Parse what follows <|python_tag|>: objects, or a call of a built-in tool; Python code is content."""
    if text.startswith("{") and _PYTHON_TAG not in text:
        pieces = [*(reader := _LlamaReader()).feed(text), *reader.finish()]
        return _all_calls([piece if isinstance(piece, ToolCall) else None for piece in pieces])
    if _BUILTIN_CALL.match(text) is None:
        return None
    calls = _parse_python(text)
    return calls and [ToolCall(call.name.removesuffix(".call"), call.arguments) for call in calls]


@dataclass(frozen=True)
class PythonicParser:
    """The form of Llama-4: an answer that is a list of Python calls."""

    marks: Collection[str] = ("<|python_start|>", "<|python_end|>")

    def make_reader(self, _: ToolSchemas) -> TextReader:
        return _PythonicReader()


_LIST_HEAD = re.compile(r"(?:<\|python_start\|>)?\s*\[\s*[A-Za-z_][\w.]*\(")
_LIST_PREFIX = re.compile(r"<(?:\|[a-z_]*\|?>?)?|(?:<\|python_start\|>)?\s*(?:\[\s*(?:[A-Za-z_][\w.]*)?)?")


class _PythonicReader:
    """The reader of PythonicParser: it decides at the start whether the answer is calls."""

    def __init__(self) -> None:
        self._held: list[str] = []
        self._head = ""
        self._is_list: bool | None = None

    def feed(self, text: str) -> list[AnswerPiece]:
        if self._is_list is False:
            return [ContentText(text)] if text else []
        self._held.append(text)
        if self._is_list is None:
            self._head = (self._head + text).lstrip()[:MAX_HEAD_CHARS]
            if _LIST_HEAD.match(self._head) is not None:
                self._is_list = True
            elif len(self._head) == MAX_HEAD_CHARS or _LIST_PREFIX.fullmatch(self._head) is None:
                self._is_list = False
                return self._release()
        return []

    def finish(self) -> list[AnswerPiece]:
        if self._is_list:
            text = "".join(self._held).strip()
            calls = _parse_python(text.removeprefix("<|python_start|>").removesuffix("<|python_end|>"))
            if calls is not None:
                return list(calls)
        return self._release()

    def _release(self) -> list[AnswerPiece]:
        text, self._held = "".join(self._held), []
        return [ContentText(text)] if text else []


@dataclass(frozen=True)
class TextParser:
    """The parser of models that make no calls: all text is content."""

    marks: Collection[str] = ()

    def make_reader(self, _: ToolSchemas) -> TextReader:
        return PlainReader()


TOOL_PARSERS: Mapping[str, ToolParser] = {
    "hermes": BlockParser(openings=("<tool_call>",), closings=("</tool_call>",), parse_block=_parse_hermes),
    "qwen3-coder": BlockParser(
        openings=("<tool_call>", "<function="), closings=("</tool_call>",), parse_block=_parse_qwen_coder
    ),
    "glm": BlockParser(openings=("<tool_call>",), closings=("</tool_call>",), parse_block=_parse_glm),
    "deepseek": BlockParser(
        openings=(CALL_START,),
        closings=(_CALL_END,),
        frames=_DEEPSEEK_FRAMES,
        parse_block=_parse_deepseek,
        marks=(CALL_START, _CALL_SEPARATOR, _CALL_END, *_DEEPSEEK_FRAMES),
    ),
    "mistral": BlockParser(
        openings=("[TOOL_CALLS]",), parse_block=_parse_mistral, marks=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    ),
    "gpt-oss": BlockParser(
        openings=("<|start|>",),
        closings=HARMONY_ENDS,
        parse_block=_parse_harmony,
        marks=HARMONY_MARKS,
    ),
    "llama": LlamaParser(),
    "pythonic": PythonicParser(),
    "gemma": BlockParser(
        openings=("```tool_code\n", *(opening for opening, _, _ in GEMMA_CALLS)),
        closings=("\n```", *(closing for _, closing, _ in GEMMA_CALLS)),
        parse_block=_parse_gemma,
        marks=tuple(mark for call in GEMMA_CALLS for mark in call),
    ),
    "phi": BlockParser(
        openings=("<|tool_call|>", "functools["),
        closings=("<|/tool_call|>",),
        parse_block=_parse_phi,
        marks=("<|tool_call|>", "<|/tool_call|>"),
    ),
    "none": TextParser(),
}

CALL_FORMS: Mapping[str, CallForm] = {
    "hermes": PLAIN_CALL,
    "qwen3-coder": CallForm(
        "<tool_call>\n<function=NAME>\n", "<parameter=KEY>\nVALUE\n</parameter>\n", "</function>\n</tool_call>"
    ),
    "glm": CallForm("<tool_call>NAME\n", "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n", "</tool_call>"),
    "deepseek": CallForm(
        f"{_DEEPSEEK_FRAMES[0]}{CALL_START}NAME{_CALL_SEPARATOR}", after=_CALL_END + _DEEPSEEK_FRAMES[1]
    ),
    "mistral": CallForm('[TOOL_CALLS][{"name": "NAME", "arguments": ', after="}]"),
    "gpt-oss": CallForm("<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>"),
    "llama": CallForm('{"name": "NAME", "parameters": ', after="}"),
    "pythonic": CallForm("[NAME(", "KEY=VALUE", ")]", ", ", is_python=True),
    "gemma": CallForm("```tool_code\nNAME(", "KEY=VALUE", ")\n```", ", ", is_python=True),
    "phi": CallForm('<|tool_call|>[{"name": "NAME", "arguments": ', after="}]<|/tool_call|>"),
}
"""A call as each family writes it."""
