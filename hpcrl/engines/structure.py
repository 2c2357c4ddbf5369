"""Write the required form of an answer's text as a grammar: the same one in every engine that honours it.

    relax_structure   leave out of its schemas what no answer can be held to, and that JSON Schema lets be ignored
    check_structure   refuse a structure that no engine can serve, before it is sent
    write_grammar     a request's structure as a grammar of llguidance, in Lark's form
    read_answered     the tokens in its first line, which another engine has generated
    read_token_names  the tokens of a model that have a name in texts, such as <|im_end|>
    raise_matcher_error  report what is wrong with a matcher of llguidance
    MAX_STRUCTURE_BYTES, MAX_STRUCTURE_DEPTH, MAX_ALTERNATIVES, MAX_ITEMS, MAX_PATTERNS  bounds

The grammar ends with a stop token of the request. JSON is written with any white space between its values and with
the properties of an object in the order of the schema; `oneOf` is read as `anyOf`. A keyword that only restricts an
answer, and that llguidance cannot hold it to, is left out by name; annotations such as `title` are ignored. What gives
the answer its shape, such as `$ref` or `type`, is refused if it cannot be read.
"""

import functools
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from hpcrl.engines.base import ExactText, FreeText, JsonValue, OutputPart, OutputStructure, PartChoice
from hpcrl.errors import EngineError, EngineRequestError

MAX_STRUCTURE_BYTES = 256 << 10
"""A structure in JSON: the schemas of about a hundred tools."""
MAX_STRUCTURE_DEPTH = 64
"""Values within values, in a structure and its schemas together."""
MAX_ALTERNATIVES = 256
MAX_ITEMS = 10_000
"""The largest minItems or maxItems: an array takes memory for each of its items before the first is generated."""
_JSON, _JSON_OBJECT, _FREE = "JSON", "JSON that is an object", "free text"
_MARK_PATTERN = re.compile(r"<|\[[A-Z_]+\]")
"""Texts that are most likely one token, such as [TOOL_CALLS]."""
_JSON_STARTS = frozenset('{["-0123456789tfn')
_JSON_OPTIONS = {"coerce_one_of": True}
MAX_PATTERNS = 256
"""The different patterns and formats in a structure's schemas: checking one takes some milliseconds."""
_NUM_REMEMBERED = 2 * MAX_PATTERNS
_UNHELD_KEYWORDS = (
    *("uniqueItems", "contains", "minContains", "maxContains", "unevaluatedItems", "unevaluatedProperties"),
    *("propertyNames", "dependentRequired", "dependentSchemas", "dependencies", "not", "if", "then", "else"),
)
"""Keywords of JSON Schema that only restrict an answer, and that llguidance does not support."""
_MAPS_OF_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_SCHEMA_KEYWORDS = frozenset(
    ("allOf", "anyOf", "oneOf", "prefixItems", "items", "additionalItems", "additionalProperties")
)
"""Keywords whose value is a schema, or a list of them."""


def relax_structure(structure: OutputStructure) -> tuple[OutputStructure, list[str]]:
    """Return the structure without what no answer can be held to, and the keywords that were left out.

    Raises EngineRequestError if it is too large.
    """
    _check_bounds(structure)
    dropped: dict[str, None] = {}
    parts = [_relax_part(part, dropped) for part in structure.parts]
    return msgspec.structs.replace(structure, parts=parts), list(dropped)


def _relax_part(part: OutputPart, dropped: dict[str, None]) -> OutputPart:
    match part:
        case JsonValue(schema=schema):
            return JsonValue(schema=_relax_schema(schema, dropped))
        case PartChoice(alternatives=alternatives):
            relaxed = [[_relax_part(inner, dropped) for inner in alternative] for alternative in alternatives]
            return msgspec.structs.replace(part, alternatives=relaxed)
    return part


def _relax_schema(schema: Any, dropped: dict[str, None]) -> Any:
    if isinstance(schema, list):
        return [_relax_schema(item, dropped) for item in schema]
    if not isinstance(schema, dict):
        return schema
    left_out = {keyword: name for keyword in schema if (name := _name_unheld(schema, keyword))}
    dropped |= {name: None for keyword, name in left_out.items() if schema[keyword] is not False}
    if "patternProperties" in left_out:  # what it describes is allowed as anything, not forbidden
        left_out["additionalProperties"] = ""
    kept: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in left_out:
            continue
        if keyword in _MAPS_OF_SCHEMAS and isinstance(value, dict):
            kept[keyword] = {name: _relax_schema(inner, dropped) for name, inner in value.items()}
        else:
            kept[keyword] = _relax_schema(value, dropped) if keyword in _SCHEMA_KEYWORDS else value
    return kept


def _name_unheld(schema: dict[str, Any], keyword: str) -> str:
    """Return the name of a keyword that an answer cannot be held to, with its value if another could be; else ""."""
    value, kinds = schema[keyword], schema.get("type", "string")
    is_text = isinstance(kinds, str | list) and "string" in kinds
    match keyword:
        case "format" | "pattern" if is_text and isinstance(value, str):
            return "" if _is_held({"type": "string", keyword: value}) else f"{keyword} {value[:64]!r}"
        case "patternProperties" if isinstance(value, dict):
            return next((f"{keyword} {key[:64]!r}" for key in value if not _is_held({keyword: {key: {}}})), "")
        case "minProperties" | "maxProperties":
            return "" if _is_held({**_pick_counted(schema), keyword: value}) else keyword
    return keyword if keyword in _UNHELD_KEYWORDS else ""


def _pick_counted(schema: dict[str, Any]) -> dict[str, Any]:
    """Return what decides whether an object's properties can be counted."""
    names = schema["properties"] if isinstance(schema.get("properties"), dict) else None
    counted: dict[str, Any] = {"type": "object", "properties": {key: {} for key in names or ()}}
    return counted | ({"required": schema["required"]} if "required" in schema else {})


def _is_held(schema: dict[str, Any]) -> bool:
    """Return whether llguidance can hold an answer to a schema."""
    try:
        check_structure(OutputStructure(parts=[JsonValue(schema=schema)]))
    except EngineError:
        return False
    return True


def check_structure(structure: OutputStructure) -> None:
    """Raise EngineRequestError, with one line, if no engine can serve the structure; it may take a second, once."""
    _check_bounds(structure)
    _check_grammar(write_grammar(structure, token_names={}, stop_token_ids=()))


def write_grammar(
    structure: OutputStructure,
    *,
    token_names: Mapping[str, int],
    stop_token_ids: Sequence[int],
    answered: Sequence[int] = (),
) -> str:
    """Return the grammar of an answer that ends with one of the stop tokens; raises EngineRequestError.

    Names of tokens in texts stand for these tokens. The tokens of an answer so far, `answered`, are in a comment of the
    first line, which `read_answered` reads.
    """
    _check_bounds(structure)
    writer = _GrammarWriter(token_names, stop_token_ids)
    start = writer.add_sequence(structure.parts)
    lines = [f"{_ANSWERED_PREFIX}{','.join(map(str, answered))}", f"start: {start} {writer.write_end()}".rstrip()]
    return "\n".join([*lines, *writer.rules]) + "\n"


_ANSWERED_PREFIX = "// answered: "


def read_answered(grammar: str) -> list[int]:
    """Return the tokens that are named in the first line of a grammar of ours; other grammars have none."""
    first, _, _ = grammar.partition("\n")
    return [int(token) for token in first.removeprefix(_ANSWERED_PREFIX).split(",") if token.isdecimal()]


@functools.lru_cache(maxsize=8)
def read_token_names(tokenizer: Path) -> Mapping[str, int]:
    """Return the tokens of a tokenizer.json that a chat template writes by name; raises EngineError."""
    try:
        added = Tokenizer.from_file(str(tokenizer)).get_added_tokens_decoder()
    except Exception as error:  # tokenizers raises nothing narrower
        raise EngineError(f"a structured answer needs the tokenizer {tokenizer}: {error}") from error
    return {
        token.content: number for number, token in added.items() if token.special or _looks_like_mark(token.content)
    }


def _looks_like_mark(text: str) -> bool:
    """Return whether a token is a mark like </think>, not a run of spaces."""
    return (text[:1], text[-1:]) in (("<", ">"), ("[", "]"))


# ---- bounds


def _check_bounds(structure: OutputStructure) -> None:
    """Raise EngineRequestError if the structure is too large to be compiled."""
    if not structure.parts:
        raise EngineRequestError("the structure of the answer has no parts: leave it out, or give at least one")
    patterns: set[str] = set()
    for value, depth in _walk_values(msgspec.structs.asdict(structure)):
        if depth > MAX_STRUCTURE_DEPTH:
            raise EngineRequestError(
                f"the structure of the answer is nested more than {MAX_STRUCTURE_DEPTH} deep: flatten the schema"
            )
        if isinstance(value, PartChoice) and not 0 < len(value.alternatives) <= MAX_ALTERNATIVES:
            raise EngineRequestError(
                f"a choice in the structure of the answer has {len(value.alternatives)} alternatives: "
                f"give 1 to {MAX_ALTERNATIVES}"
            )
        if isinstance(value, dict):
            _check_counts(value)
            patterns.update(_list_patterns(value))
    if len(patterns) > MAX_PATTERNS:
        raise EngineRequestError(
            f"the structure of the answer has {len(patterns)} different patterns: at most {MAX_PATTERNS} are compiled"
        )
    try:
        size = len(msgspec.json.encode(structure))
    except UnicodeEncodeError as error:
        raise EngineRequestError(f"the structure of the answer has half a character: {error}") from None
    if size > MAX_STRUCTURE_BYTES:
        raise EngineRequestError(
            f"the structure of the answer is {size} bytes of JSON: at most {MAX_STRUCTURE_BYTES} are compiled"
        )


def _check_counts(schema: dict[str, Any]) -> None:
    for keyword in ("minItems", "maxItems"):
        count = schema.get(keyword)
        if isinstance(count, int | float) and count > MAX_ITEMS:
            raise EngineRequestError(f"the schema asks for {keyword} {count}: at most {MAX_ITEMS} are compiled")


def _list_patterns(schema: dict[str, Any]) -> Iterator[str]:
    """Yield the patterns and formats of one schema, without those of the schemas in it."""
    for keyword in ("pattern", "format"):
        if isinstance(value := schema.get(keyword), str):
            yield f"{keyword} {value}"
    if isinstance(names := schema.get("patternProperties"), dict):
        yield from (f"name {name}" for name in names)


def _walk_values(root: Any) -> Iterator[tuple[Any, int]]:
    """Yield every value with its depth, without recursion: a schema may be nested deeper than Python's stack."""
    waiting = [(root, 0)]
    while waiting:
        value, depth = waiting.pop()
        yield value, depth
        if isinstance(value, msgspec.Struct):
            value = msgspec.structs.asdict(value)
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        waiting += [(item, depth + 1) for item in inner]


@functools.lru_cache(maxsize=_NUM_REMEMBERED)
def _check_grammar(grammar: str) -> None:
    """Raise EngineRequestError unless a token can be generated by the grammar."""
    matcher = LLMatcher(_make_byte_tokenizer(), grammar, log_level=0)
    matcher.compute_bitmask()
    raise_matcher_error(matcher)


@functools.cache
def _make_byte_tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")


def raise_matcher_error(matcher: LLMatcher) -> None:
    """Raise EngineRequestError with the first line of what is wrong, if something is."""
    if not matcher.is_error():
        return
    lines = [line.strip() for line in matcher.get_error().splitlines()] or ["unknown"]
    first = lines[0] if not lines[0].endswith(":") else " ".join(line for line in lines if line.strip("^ "))
    why = re.sub(r"^at \d+\(\d+\): ", "", first)
    if why.startswith("NoExtension"):
        why = "no text matches it: see its $ref and enum"
    raise EngineRequestError(f"the structure of the answer cannot be held to: {why[:300]}")


# ---- grammar


class _GrammarWriter:
    """The rules of one grammar."""

    def __init__(self, token_names: Mapping[str, int], stop_token_ids: Sequence[int]) -> None:
        self.rules: list[str] = []
        self._token_names = token_names
        self._stop_token_ids = sorted(set(stop_token_ids))
        self._pattern = re.compile("|".join(map(re.escape, sorted(token_names, key=len, reverse=True))) or "(?!)")
        self._numbers = itertools.count()

    def write_end(self) -> str:
        return f"<[{','.join(map(str, self._stop_token_ids))}]>" if self._stop_token_ids else ""

    def add_sequence(self, parts: Sequence[OutputPart]) -> str:
        """Add the rules of some parts and return what stands for all of them."""
        for at, part in enumerate(parts):
            if isinstance(part, PartChoice):
                self._check_choice(part, parts[at + 1 :])
        return " ".join(self._add_part(part) for part in parts) or '""'

    def _add_part(self, part: OutputPart) -> str:
        match part:
            case ExactText(text=text):
                return " ".join(self._split_text(text)) or '""'
            case JsonValue(schema=schema):
                options = {key: value for key, value in schema.items() if key != "x-guidance"}
                return self._add_rule(f": %json {json.dumps({**options, 'x-guidance': _JSON_OPTIONS})}")
            case FreeText(until=until):
                return self._add_free_text(until)
            case PartChoice():
                return self._add_choice(part)

    def _add_free_text(self, until: str) -> str:
        """Add any text up to a mark: any tokens but stop tokens if the mark starts with a special token."""
        first, *rest = self._split_text(until) or [""]
        if not first or (rest and not first.startswith("<")):
            raise EngineRequestError(f"free text ends at {until!r}: it must be some text, with any special token first")
        if not first.startswith("<"):
            return self._add_rule(rf"[lazy]: /(.|\n)*/ {first}")
        others = ",".join(map(str, [*self._stop_token_ids, first.strip("<[]>")]))
        return " ".join([self._add_rule(f": (<[^{others}]>)*"), first, *rest])

    def _add_choice(self, choice: PartChoice) -> str:
        sequences = [self.add_sequence(alternative) for alternative in choice.alternatives]
        one = self._add_rule(": " + " | ".join(f"({sequence})" for sequence in sequences))
        if not choice.may_repeat:
            return one
        separator = " ".join(self._split_text(choice.separator))
        return self._add_rule(f": {one} ({separator} {one})*")

    def _check_choice(self, choice: PartChoice, following: Sequence[OutputPart]) -> None:
        """Raise EngineRequestError if its alternatives are not distinct: llguidance takes the longest that fits."""
        if choice.may_repeat and not all(choice.alternatives):
            raise EngineRequestError("an empty alternative cannot be repeated: leave it or may_repeat out")
        starts = [self._find_starts([*alternative, *following])[0] for alternative in choice.alternatives]
        seen = set().union(*starts)
        if _FREE in seen and any(start != {_FREE} for start in starts):
            raise EngineRequestError(
                "one alternative starts with free text, which may be any other: start it with a text"
            )
        json_starts = _JSON_STARTS if _JSON in seen else {"{"} if _JSON_OBJECT in seen else ()
        if like := seen.intersection(json_starts):
            raise EngineRequestError(
                f"one alternative starts with JSON and another with the text {min(like)!r}: write both as JSON"
            )

    def _find_starts(self, parts: Sequence[OutputPart]) -> tuple[set[str], bool]:
        """Return what an answer of these parts can start with, and whether it can be empty."""
        starts: set[str] = set()
        for part in parts:
            match part:
                case ExactText(text=text) if pieces := self._split_text(text):
                    return starts | {pieces[0] if _MARK_PATTERN.match(text) else text[0]}, False
                case JsonValue(schema=schema):
                    return starts | {_JSON_OBJECT if schema.get("type") == "object" else _JSON}, False
                case FreeText():
                    return starts | {_FREE}, False
                case PartChoice(alternatives=alternatives):
                    inner = [self._find_starts(alternative) for alternative in alternatives]
                    starts = starts.union(*(found for found, _ in inner))
                    if not any(is_empty for _, is_empty in inner):
                        return starts, False
        return starts, True

    def _split_text(self, text: str) -> list[str]:
        """Return the pieces of a text: strings, and tokens by their ids."""
        pieces, start = [], 0
        for found in self._pattern.finditer(text):
            pieces += [json.dumps(text[start : found.start()]), f"<[{self._token_names[found.group()]}]>"]
            start = found.end()
        return [piece for piece in [*pieces, json.dumps(text[start:])] if piece != '""']

    def _add_rule(self, definition: str) -> str:
        name = f"p{next(self._numbers)}"
        self.rules.append(name + definition)
        return name
