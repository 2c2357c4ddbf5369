"""The keys of recipes and sites with their types, defaults and meanings, read from the structs and their source.

list_keys      all keys of a struct and of those inside it
ConfigKey      one of them
format_keys    a table of keys as text
"""

import ast
import functools
import inspect
import textwrap
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec
from msgspec import NODEFAULT, Meta

MAX_DEFAULT_CHARS = 60


class ConfigKey(msgspec.Struct, frozen=True, kw_only=True):
    """One key."""

    key: str
    """Dotted; `NAME` stands where the user chooses a name."""
    type: str
    default: str | None
    """None: it is required."""
    meaning: str


def list_keys(kind: type[msgspec.Struct], *, prefix: str = "") -> list[ConfigKey]:
    """List the keys of a struct, depth first, in the order of its fields."""
    return list(_iterate_keys(kind, prefix=prefix, outer=()))


def format_keys(keys: Sequence[ConfigKey], *, width: int = 100) -> list[str]:
    """Format keys as lines: key, type and default, and below them the meaning."""
    lines = []
    for key in keys:
        default = "required" if key.default is None else f"default {key.default}"
        lines.append(f"{key.key}  ({key.type}, {default})")
        lines += textwrap.wrap(key.meaning, width - 4, initial_indent="    ", subsequent_indent="    ")
    return lines


def _iterate_keys(
    kind: type[msgspec.Struct], *, prefix: str, outer: tuple[type[msgspec.Struct], ...]
) -> Iterator[ConfigKey]:
    hints = typing.get_type_hints(kind, include_extras=True)
    meanings = _read_meanings(kind)
    for field in msgspec.structs.fields(kind):
        key = f"{prefix}{field.encode_name}"
        inner, is_named = _find_struct(hints[field.name])
        text = meanings.get(field.name) or (_read_summary(inner) if inner else "")
        yield ConfigKey(
            key=f"{key}.NAME" if is_named else key,
            type="table" if inner else format_type(hints[field.name]),
            default=_format_default(field),
            meaning=text,
        )
        if inner is not None and inner not in outer:
            deeper = f"{key}.NAME." if is_named else f"{key}."
            yield from _iterate_keys(inner, prefix=deeper, outer=(*outer, kind))


def _find_struct(hint: Any) -> tuple[type[msgspec.Struct] | None, bool]:
    """Return the struct that a field holds, if any, and whether the user names several of them."""
    hint = _strip(hint)
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return hint, False
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is dict:
        return _find_struct(inner[1])[0], _find_struct(inner[1])[0] is not None
    if origin in (list, tuple) and inner:
        return _find_struct(inner[0])[0], False
    if origin in (typing.Union, types.UnionType):
        return next((found for one in inner if (found := _find_struct(one))[0] is not None), (None, False))
    return None, False


def _strip(hint: Any) -> Any:
    return _strip(hint.__origin__) if typing.get_origin(hint) is typing.Annotated else hint


def format_type(hint: Any) -> str:
    """Format a type as a person reads it: `int >= 1`, `"grpo" or "rloo"`."""
    if typing.get_origin(hint) is typing.Annotated:
        limits = [limit for meta in hint.__metadata__ if isinstance(meta, Meta) for limit in _format_limits(meta)]
        return " ".join([format_type(hint.__origin__), *limits])
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return " or ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in inner)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(format_type(one) for one in inner if one is not type(None))
    if origin in (list, tuple):
        return f"list of {format_type(inner[0])}" if inner else "list"
    if origin is dict:
        return f"table of {format_type(inner[1])}" if inner else "table"
    names = {str: "text", int: "integer", float: "number", bool: "true or false", Any: "any value", dict: "table"}
    return names.get(hint, getattr(hint, "__name__", str(hint)))


def _format_limits(meta: Meta) -> Iterator[str]:
    for sign, value in ((">=", meta.ge), (">", meta.gt), ("<=", meta.le), ("<", meta.lt)):
        if value is not None:
            yield f"{sign} {value:g}"


def _format_default(field: msgspec.structs.FieldInfo) -> str | None:
    if field.default_factory is not NODEFAULT:
        value = field.default_factory()
        if isinstance(value, msgspec.Struct) or value in ({}, [], ()):
            return "empty" if not isinstance(value, msgspec.Struct) else "its own defaults"
    elif field.default is NODEFAULT:
        return None
    else:
        value = field.default
    if isinstance(value, msgspec.Struct):
        return "its own defaults"
    if value is None or value is msgspec.UNSET:
        return "none"
    text = "true" if value is True else "false" if value is False else msgspec.json.encode(value).decode()
    return text if len(text) <= MAX_DEFAULT_CHARS else f"{text[:MAX_DEFAULT_CHARS]}..."


def _read_summary(kind: type) -> str:
    return " ".join((inspect.getdoc(kind) or "").partition("\n\n")[0].split())


def _read_meanings(kind: type) -> dict[str, str]:
    """Return the docstring below each field, also of those that are inherited."""
    meanings: dict[str, str] = {}
    for owner in reversed(kind.__mro__):
        if issubclass(owner, msgspec.Struct) and owner is not msgspec.Struct:
            meanings |= _parse_meanings(owner)
    return meanings


@functools.cache
def _parse_meanings(kind: type) -> dict[str, str]:
    try:
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    except (OSError, TypeError, SyntaxError):
        return {}
    assert isinstance(body, ast.ClassDef)
    meanings: dict[str, str] = {}
    name = ""
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and name:
            meanings[name] = " ".join(str(node.value.value).split())
            name = ""
        else:
            name = ""
    return meanings
