"""Turn TOML files into frozen structs.

find_toml         the file meant by `quickstart` or `my/recipe.toml`
load_table        its table, with `extends` resolved and `-s key=value` applied
to_struct         the struct, or a ConfigError that names the key, the value and the nearest known name
suggest_name      "did you mean ...? "
shipped_folder, user_folder, list_known_names    the places and names of recipes and sites
ConfigKind, TomlTable                            types
USER_CODE_PATTERN, NAME_PATTERN, PATTERN_MEANINGS, MAX_DEPTH, RENAMED_KEYS    what is accepted
"""

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from hpcrl.errors import ConfigError

ConfigKind = Literal["recipes", "sites"]
TomlTable = dict[str, Any]
T = TypeVar("T", bound=msgspec.Struct)

USER_CODE_PATTERN = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$"
PATTERN_MEANINGS = {
    USER_CODE_PATTERN: "`package.module:name`",
    NAME_PATTERN: "a name of at most 64 letters, digits, '_' and '-'",
}
"""The meaning of each pattern, for error messages."""
MAX_DEPTH = 64
"""Limit of nested tables and lists; no recipe or site needs a tenth of that."""
RENAMED_KEYS = {
    "router.reluctance": "router.mismatch_penalty",
    "router.home": "router.prefix_affinity",
    "router.stay": "router.migration_factor",
    "router.hold_back": "router.kv_admission",
    "router.flip": "router.switch_roles",
    "router.sampled": "router.log_share",
    "spool.keep_versions": "spool.archive_versions",
}
"""Old keys of recipes and their new names, for error messages."""


def shipped_folder(folder: Literal["recipes", "sites", "jobs"]) -> Path:
    """Return a folder that ships with hpcrl: inside the wheel, else at the top of the checkout."""
    package = Path(__file__).parents[1]
    inside = package / "_shipped" / folder
    return inside if inside.is_dir() else package.parent / folder


def user_folder(kind: ConfigKind) -> Path:
    """Return the folder in which the user's own sites or recipes are found by name."""
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(home) / "hpcrl" / kind


def list_known_names(kind: ConfigKind) -> list[str]:
    """Return the names that `find_toml` accepts, shipped and the user's own."""
    folders = (user_folder(kind), shipped_folder(kind))
    return sorted({path.stem for folder in folders if folder.is_dir() for path in folder.glob("*.toml")})


def find_toml(kind: ConfigKind, name: str, *, beside: Path | None = None) -> Path:
    """Find the TOML file with this path or name."""
    if name.endswith(".toml") or "/" in name:
        path = Path(name).expanduser()
        candidates = [beside / path, path] if beside else [path]
    else:
        candidates = [folder / f"{name}.toml" for folder in (beside, user_folder(kind), shipped_folder(kind)) if folder]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    names = list_known_names(kind)
    raise ConfigError(
        f"no {kind[:-1]} {name!r}: {suggest_name(name, names)}known by name: {', '.join(names) or 'none'}; "
        f"a path must name a .toml file (your own go to {user_folder(kind)})"
    )


def load_table(kind: ConfigKind, name: str, *, settings: Sequence[str] = ()) -> tuple[TomlTable, str]:
    """Return the table of a recipe or site with `extends` and settings applied, and its path for messages."""
    path = find_toml(kind, name)
    table = _load_extended(kind, path, seen=())
    parsed = [_parse_setting(setting) for setting in settings]
    for key, _ in parsed:
        _drop_replaced(table, key)
    for key, value in parsed:
        _apply_setting(table, key, value)
    _refuse_deep(table, source=str(path))
    return table, str(path)


def to_struct(table: TomlTable, kind: type[T], *, source: str) -> T:
    """Convert `table`, or raise a ConfigError that names the wrong key, the value seen and what is expected."""
    _refuse_unknown(table, kind, source=source, trail=())
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {_explain_error(str(error), table, kind)}") from error


def _load_extended(kind: ConfigKind, path: Path, *, seen: tuple[Path, ...]) -> TomlTable:
    resolved = path.resolve()
    if resolved in seen:
        chain = " -> ".join(p.name for p in (*seen, resolved))
        raise ConfigError(f"{path}: `extends` forms a cycle ({chain}): remove one of them")
    table = _parse_toml(path)
    base = table.pop("extends", None)
    if base is None:
        return table
    if not isinstance(base, str):
        raise ConfigError(f"{path}: extends: expected a name or a path, got {base!r}")
    beside = path.parent if base.endswith(".toml") or "/" in base else None
    own_name = beside is None and path.stem == base  # a user's own `lab.toml` that extends the shipped `lab`
    parent = shipped_folder(kind) / f"{base}.toml" if own_name else find_toml(kind, base, beside=beside)
    return _merge_tables(_load_extended(kind, parent, seen=(*seen, resolved)), table)


def _parse_toml(path: Path) -> TomlTable:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ConfigError(_too_deep(path)) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}): save it as UTF-8") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    _refuse_deep(table, source=path)
    return table


def _refuse_deep(table: TomlTable, *, source: object) -> None:
    """Refuse a table that is nested too deep for recursive functions; checked level by level, without recursion."""
    level: list[Any] = [table]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _members(outer)]
    if level:
        raise ConfigError(_too_deep(source))


def _members(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _too_deep(source: object) -> str:
    return f"{source}: more than {MAX_DEPTH} tables or lists are nested in each other: make it flatter"


def _replaced_key(trail: tuple[str, ...]) -> str | None:
    """Return the sibling key that is dropped when a child of `extends`, or a setting, sets this one.

    Options are arguments of one function, and another function may not accept them; a model has a path or is tiny.
    """
    match trail:
        case ("domains", _, "env") | ("train", "pipeline", _, "function"):
            return "options"
        case ("domains", _, "reward"):
            return "reward_options"
        case ("model", "path"):
            return "tiny"
        case ("model", "tiny"):
            return "path"
    return None


def _merge_tables(base: TomlTable, over: TomlTable, *, trail: tuple[str, ...] = ()) -> TomlTable:
    replaced = {_replaced_key((*trail, key)) for key in over}
    merged = {key: value for key, value in base.items() if key not in replaced}
    for key, value in over.items():
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            merged[key] = _merge_tables(old, value, trail=(*trail, key))
        else:
            merged[key] = value
    return merged


def _parse_setting(setting: str) -> tuple[tuple[str, ...], Any]:
    """Return the key and the value of one `dotted.key=value`; a value that is not TOML is plain text."""
    key, equals, text = setting.partition("=")
    parts = tuple(part.strip() for part in key.split("."))
    if not equals or not all(parts):
        raise ConfigError(f"-s {setting}: expected key=value, such as -s rollout.group_size=16")
    try:
        return parts, tomllib.loads(f"value = {text}")["value"]
    except RecursionError:
        raise ConfigError(_too_deep(f"-s {key.strip()}")) from None
    except tomllib.TOMLDecodeError:
        return parts, text


def _drop_replaced(table: TomlTable, key: tuple[str, ...]) -> None:
    """Drop what the files set beside a key and a setting of it replaces; done before any setting is applied."""
    for length, part in enumerate(key, start=1):
        table.pop(_replaced_key(key[:length]) or "", None)
        inner = table.get(part)
        if not isinstance(inner, dict):
            return
        table = inner


def _apply_setting(table: TomlTable, key: tuple[str, ...], value: Any) -> None:
    for part in key[:-1]:
        inner = table.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"-s {'.'.join(key)}: {part!r} is {inner!r}, not a table: leave out what follows it")
        table = inner
    table[key[-1]] = value


def _refuse_unknown(value: Any, kind: Any, *, source: str, trail: tuple[str, ...]) -> None:
    info = kind if isinstance(kind, msgspec.inspect.Type) else msgspec.inspect.type_info(kind)
    match info:
        case msgspec.inspect.StructType(fields=fields) if isinstance(value, dict):
            known = {field.encode_name: field.type for field in fields}
            for key, inner in value.items():
                if key not in known:
                    raise ConfigError(_explain_unknown_key(source, trail, key, known))
                _refuse_unknown(inner, known[key], source=source, trail=(*trail, key))
        case msgspec.inspect.DictType(value_type=value_type) if isinstance(value, dict):
            for key, inner in value.items():
                _refuse_unknown(inner, value_type, source=source, trail=(*trail, key))
        case msgspec.inspect.UnionType(types=types):
            for member in types:
                _refuse_unknown(value, member, source=source, trail=trail)
        case _:
            pass


def _explain_unknown_key(source: str, trail: tuple[str, ...], key: str, known: Iterable[str]) -> str:
    where = ".".join((*trail, key))
    if where in RENAMED_KEYS:
        return f"{source}: {where!r} is now called {RENAMED_KEYS[where]!r}: use the new name"
    names = sorted(known)
    table = f"[{'.'.join(trail)}]" if trail else "the top level"
    return f"{source}: unknown key {where!r}: {suggest_name(key, names)}{table} takes {', '.join(names)}"


def suggest_name(name: str, names: Sequence[str]) -> str:
    """Return "did you mean ...? " with the closest known name; empty if none is close."""
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}? " if close else ""


def _explain_error(message: str, table: TomlTable, kind: type[msgspec.Struct]) -> str:
    """Rewrite msgspec's "Expected `int`, got `str` - at `$.a.b`" with the key first, and add the value seen."""
    found = re.fullmatch(r"(?P<what>.*?)(?: - at `\$\.?(?P<trail>.*)`)?", message, re.DOTALL)
    assert found is not None
    what = found["what"].replace("`", "")
    for pattern, meaning in PATTERN_MEANINGS.items():
        what = what.replace(f"str matching regex {pattern!r}", meaning)
    trail = [part for part in re.split(r"[.\[\]]", (found["trail"] or "").replace("[...]", ".*")) if part]
    trail = _resolve_wildcard(trail, message, table, kind)
    missing = re.search(r"Object missing required field (\S+)", what)
    if missing:
        return f"{'.'.join([*trail, missing[1]])}: missing; it has no default, so add it"
    seen: Any = table
    for part in trail:
        if isinstance(seen, dict) and part in seen:
            seen = seen[part]
        elif isinstance(seen, list) and part.isdigit() and int(part) < len(seen):
            seen = seen[int(part)]
        else:
            return f"{'.'.join(trail)}: {what}"
    return f"{'.'.join(trail)}: {what[:1].lower()}{what[1:]} (seen: {seen!r})"


def _resolve_wildcard(trail: list[str], message: str, table: TomlTable, kind: type[msgspec.Struct]) -> list[str]:
    """Replace msgspec's placeholder for "some key of a dict" by the key that fails on its own."""
    if "*" not in trail:
        return trail
    at = trail.index("*")
    inner: Any = table
    for part in trail[:at]:
        inner = inner[part]
    for key, value in inner.items():
        alone: TomlTable = {key: value}
        for part in reversed(trail[:at]):
            alone = {part: alone}
        try:
            msgspec.convert({**table, **alone}, kind)
        except msgspec.ValidationError as error:
            if str(error) == message:
                return [*trail[:at], key, *trail[at + 1 :]]
    return trail
