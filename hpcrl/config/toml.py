"""Turn TOML files into frozen structs.

find_toml         the file meant by `quickstart` or `my/recipe.toml`
load_table        its table, with `extends` resolved and `-s key=value` applied
apply_settings    the same for tables that are loaded already
drop_unknown      rename and remove what another version of hpcrl had
to_struct         the struct, or a ConfigError that names the key, the value and the nearest known name
format_toml       the text of a file
flatten_table     the settings of a table with their dotted keys
LayeredTable      a table and the files and settings that it was made of
name_setting      a message about a key, with the setting that has set it
suggest_name      "did you mean ...? "
shipped_folder, user_folder, list_known_names    the places and names of recipes and sites
ConfigKind, ShippedFolder, TomlTable             types
USER_CODE_PATTERN, NAME_PATTERN, JUDGE_NAME_PATTERN, VARIABLE_PATTERN    what is accepted
PATTERN_MEANINGS, TYPE_WORDS                     the same in words
RENAMED_KEYS, REMOVED_KEYS, RENAMED_VALUES       what was accepted
MAX_DEPTH, MAX_BYTES, MAX_EXTENDS, MIN_INTEGER, MAX_INTEGER        limits
"""

import contextlib
import copy
import difflib
import json
import math
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from hpcrl.errors import ConfigError
from hpcrl.system.files import expand_path, is_file

ConfigKind = Literal["recipes", "sites"]
ShippedFolder = Literal["recipes", "sites", "jobs"]
TomlTable = dict[str, Any]
T = TypeVar("T", bound=msgspec.Struct)

USER_CODE_PATTERN = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$"
JUDGE_NAME_PATTERN = r"^[a-z][a-z0-9_]{0,31}$"
VARIABLE_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]*$"
PATTERN_MEANINGS = {
    USER_CODE_PATTERN: "`package.module:name`",
    NAME_PATTERN: "a name of at most 64 letters, digits, '_' and '-'",
    JUDGE_NAME_PATTERN: "a name of at most 32 lower-case letters, digits and '_', as it is part of a variable's name",
    VARIABLE_PATTERN: "the name of a variable, of letters, digits and '_'",
}
"""The meaning of each pattern, for error messages."""
MAX_DEPTH = 64
"""Limit of nested tables and lists; no recipe or site needs a tenth of that."""
MAX_BYTES = 1 << 18
"""Limit of a file or setting; the largest recipe that ships has a hundredth of that."""
MAX_EXTENDS = 16
"""Limit of files that extend each other."""
MIN_INTEGER, MAX_INTEGER = -(1 << 63), (1 << 63) - 1
"""The integers of TOML."""
_COMMENT = r"#[^\n]*+"
_LONG_STRING = r"""\"{3}(?:[^"\\]|\\.|"(?!""))*+(?:"{3,5}|\Z)|'{3}(?:[^']|'(?!''))*+(?:'{3,5}|\Z)"""
_SHORT_STRING = r"""\"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+'"""
_COMMENT_OR_STRING = re.compile(f"{_COMMENT}|{_LONG_STRING}|{_SHORT_STRING}", re.DOTALL)
_DEEP_KEY = re.compile(rf"(?<![\w.-])(?:[\w-]++[ \t]*+\.[ \t]*+){{{MAX_DEPTH}}}")
"""A dotted key that is nested too deep, its quoted parts replaced: tomllib takes minutes for thousands of parts."""
_KEY_PART = re.compile(r"""\s*(?:"(?:[^"\\]|\\.)*"|'[^']*')\s*(?=[.=]|\Z)|[^.=]*""", re.DOTALL)
"""A part of the key of a setting, which may be quoted."""
TYPE_WORDS = {
    "int": "integer",
    "float": "number",
    "str": "text",
    "bool": "true or false",
    "object": "table",
    "array": "list",
}
"""The words for types, by msgspec's names."""
RENAMED_KEYS = {
    "router.reluctance": "router.mismatch_penalty",
    "router.home": "router.prefix_affinity",
    "router.stay": "router.migration_factor",
    "router.hold_back": "router.kv_admission",
    "router.flip": "router.switch_roles",
    "router.sampled": "router.log_share",
    "spool.keep_versions": "spool.archive_versions",
}
"""Old keys of recipes and their new names."""
REMOVED_KEYS = {
    "containers": 'its list is now one word, the program that runs images, as in container = "apptainer"',
    "partitions.*.notes": "remove it",
}
"""Old keys of sites whose value no other key takes, and what to write instead; `*` is any name."""
RENAMED_VALUES = {("resources.decode.num_workers", 0): "auto"}
"""Old values of recipes and their new names."""


def shipped_folder(folder: ShippedFolder) -> Path:
    """Return a folder that ships with hpcrl: inside the wheel, else at the top of the checkout."""
    package = Path(__file__).parents[1]
    inside = package / "_shipped" / folder
    return inside if inside.is_dir() else package.parent / folder


def user_folder(kind: ShippedFolder) -> Path:
    """Return the folder in which the user's own sites, recipes or prologues are found by name."""
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(home) / "hpcrl" / kind


def list_known_names(kind: ConfigKind) -> list[str]:
    """Return the names that `find_toml` accepts, shipped and the user's own."""
    folders = (user_folder(kind), shipped_folder(kind))
    return sorted({path.stem for folder in folders if folder.is_dir() for path in folder.glob("*.toml")})


def find_toml(kind: ConfigKind, name: str, *, beside: Path | None = None) -> Path:
    """Find the TOML file with this path or name."""
    if name.endswith(".toml") or "/" in name:
        path = expand_path(name)
        candidates = [beside / path, path] if beside else [path]
    else:
        candidates = [folder / f"{name}.toml" for folder in (beside, user_folder(kind), shipped_folder(kind)) if folder]
    for candidate in candidates:
        if is_file(candidate):
            return candidate
    names = list_known_names(kind)
    here = Path(f"{name}.toml")
    hint = f"did you mean './{here}'? " if here.parent == Path() and is_file(here) else suggest_name(name, names)
    inside = expand_path(name) / f"{kind[:-1]}.toml"
    if is_file(inside):
        hint = f"it is a directory: did you mean '{Path(name) / inside.name}'? "
    raise ConfigError(
        f"no {kind[:-1]} {_shorten(repr(name))}: {hint}known by name: {', '.join(names) or 'none'}; "
        f"a path must name a .toml file (your own go to {user_folder(kind)})"
    )


@dataclass(frozen=True, kw_only=True)
class LayeredTable:
    """The table of a recipe or site, and what it was made of: each file and setting with its own table."""

    table: TomlTable
    layers: tuple[tuple[str, TomlTable], ...]
    """The file first, then its parents, then the settings."""

    @property
    def file(self) -> str:
        return self.layers[0][0]

    def find_source(self, trail: Sequence[str]) -> str:
        """Return the file or setting that this key comes from; the file itself if it is in none."""
        num_files = sum(not name.startswith("-s ") for name, _ in self.layers)
        by_precedence = (*reversed(self.layers[num_files:]), *self.layers[:num_files])
        found = (name for name, table in by_precedence if _has_key(table, trail) or _replaces_table(name, trail))
        return next(found, self.file)

    def find_setting(self, *trails: Sequence[str]) -> str:
        """Return the first setting that one of these keys comes from; the file if they come from none."""
        sources = map(self.find_source, trails)
        return next((source for source in sources if source.startswith("-s ")), self.file)

    def find_folder(self, *trail: str) -> Path:
        """Return the folder of the file that this key comes from; that of the first file for a setting."""
        source = self.find_source(trail)
        return Path(self.file if source.startswith("-s ") else source).parent


def _replaces_table(source: str, trail: Sequence[str]) -> bool:
    """Return whether this is a setting of a whole table that the key is in, as `-s model={}` is of `model.path`."""
    if not source.startswith("-s "):
        return False
    parts = _split_setting(source.removeprefix("-s ").removeprefix("site."))[0]
    return len(parts) < len(trail) and parts == tuple(trail[: len(parts)])


def _has_key(table: Any, trail: Sequence[str]) -> bool:
    for part in trail:
        if isinstance(table, list) and part.isdigit():
            return True
        if not isinstance(table, dict) or part not in table:
            return False
        table = table[part]
    return True


def load_table(kind: ConfigKind, name: str, *, settings: Sequence[str] = ()) -> LayeredTable:
    """Return the table of a recipe or site with `extends` and settings applied.

    A recipe that extends another and sets no name has that of its file, and a site that of its parent, as
    it is the same machine.
    """
    (file, table), *parents = _load_files(kind, find_toml(kind, name))
    stem = Path(file).stem
    if kind == "recipes" and parents and re.match(NAME_PATTERN, stem):
        table = {"name": stem, **table}
    return apply_settings(kind, [(file, table), *parents], settings=settings)


def apply_settings(
    kind: ConfigKind, files: Sequence[tuple[str, TomlTable]], *, settings: Sequence[str] = ()
) -> LayeredTable:
    """Merge the tables of a file and its parents, and apply settings to them."""
    table: TomlTable = {}
    for _, layer in reversed(files):
        _drop_replaced(table, layer)
        table = _merge_tables(table, copy.deepcopy(layer))
    prefix = "site." if kind == "sites" else ""
    labels = [_label_setting(f"{prefix}{setting}") for setting in settings]
    parsed = [_parse_setting(setting, label=label) for setting, label in zip(settings, labels, strict=True)]
    applied = [(label, _nest_value(key, value)) for label, (key, value) in zip(labels, parsed, strict=True)]
    for _, layer in applied:
        _drop_replaced(table, layer)
    for label, (key, value) in zip(labels, parsed, strict=True):
        _apply_setting(table, key, value, label=label)
    return LayeredTable(table=table, layers=(*files, *applied))


def _spell_dates(value: Any) -> Any:
    """Return a value of TOML with its dates as text, as they are when they are quoted."""
    if isinstance(value, dict):
        return {key: _spell_dates(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_spell_dates(inner) for inner in value]
    return value.isoformat() if isinstance(value, date | time) else value


def to_struct(layered: LayeredTable, kind: type[T]) -> T:
    """Convert the table, or raise a ConfigError that names the wrong key, the value seen and what is expected."""
    if unknown := [
        _explain_unknown_key(layered.find_source(trail), trail, known, kind)
        for trail, known in _find_unknown(layered.table, kind)
    ]:
        raise ConfigError("; ".join(unknown))
    if missing := list(_find_missing(layered.table, kind)):
        if len(missing) == 1:
            source = layered.find_source(missing[0][0])
            raise ConfigError(f"{source}: {'.'.join(missing[0][0])}: missing; it has no default, so add it")
        keys = ", ".join(f"{'.'.join(trail)} ({what})" for trail, what in missing)
        source = layered.find_setting(*(trail for trail, _ in missing))
        raise ConfigError(f"{source}: these are missing and have no default, so add them: {keys}")
    _round_whole_numbers(layered.table, kind)
    try:
        return msgspec.convert(layered.table, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain_error(str(error), layered, kind)) from error


def drop_unknown(table: TomlTable, kind: type[msgspec.Struct]) -> list[str]:
    """Rename what has a new name, and remove the keys that `kind` does not have; describe both."""
    dropped = [
        f'{where} = {_show_value(old)} is now "{new}"'
        for (where, old), new in RENAMED_VALUES.items()
        if _renew_value(table, where)
    ]
    for trail, _ in list(_find_unknown(table, kind)):
        *path, key = trail
        inner: Any = table
        for part in path:
            inner = inner[int(part) if isinstance(inner, list) else part]
        value, where = inner.pop(key), ".".join(trail)
        new_name = RENAMED_KEYS.get(where)
        if new_name is not None:
            inner.setdefault(new_name.rpartition(".")[2], value)
        dropped.append(f"{where} is now {new_name}" if new_name else f"{where} is dropped")
    return dropped


def _renew_value(table: TomlTable, where: str) -> bool:
    """Replace a value by its new name, if it has one; return whether it has."""
    inner: Any = table
    *path, key = where.split(".")
    for part in path:
        inner = inner.get(part) if isinstance(inner, dict) else None
    if not isinstance(inner, dict) or (new_value := _find_new_value(where, inner.get(key))) is None:
        return False
    inner[key] = new_value
    return True


def _find_new_value(where: str, value: Any) -> str | None:
    """Return the new name of a value of a recipe; None if it has none."""
    return RENAMED_VALUES.get((where, value)) if type(value) is int else None  # not for False


def _load_files(kind: ConfigKind, path: Path) -> list[tuple[str, TomlTable]]:
    """Return the tables of a file and of those that it extends, parents last."""
    files: list[tuple[str, TomlTable]] = []
    seen: list[Path] = []
    while True:
        if path.resolve() in seen:
            chain = " -> ".join(p.name for p in (*seen, path.resolve()))
            raise ConfigError(f"{path}: `extends` forms a cycle ({chain}): remove one of them")
        if len(seen) > MAX_EXTENDS:
            raise ConfigError(f"{files[0][0]}: more than {MAX_EXTENDS} files extend each other: merge some of them")
        seen.append(path.resolve())
        table = _parse_toml(path)
        parent = table.pop("extends", None)
        files.append((str(path), table))
        if parent is None:
            return files
        path = _find_parent(kind, parent, path)


def _find_parent(kind: ConfigKind, name: Any, path: Path) -> Path:
    """Return the file that the file at `path` extends."""
    if not isinstance(name, str):
        raise ConfigError(f"{path}: extends: expected a name or a path, got {_show_value(name)}")
    try:
        if name.endswith(".toml") or "/" in name:
            return find_toml(kind, name, beside=path.parent)
        if path.stem != name:
            return find_toml(kind, name)
    except ConfigError as error:
        raise ConfigError(f"{path}: extends: {error}") from None
    shipped = shipped_folder(kind) / f"{name}.toml"  # a user's own `lab.toml` extends the shipped `lab`
    if not is_file(shipped):
        raise ConfigError(
            f"{path}: extends = {name!r} names this file itself, as no {kind[:-1]} of that name ships with hpcrl: "
            "name another one, or leave `extends` out"
        )
    return shipped


def _parse_toml(path: Path) -> TomlTable:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1).decode("utf-8-sig")  # Windows editors start with a byte order mark
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}): save it as UTF-8") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        table = _parse_text(text, source=str(path))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    _refuse_odd_numbers(table, source=str(path))
    return table


def _parse_text(text: str, *, source: str) -> TomlTable:
    """Parse TOML within the limits on depth and size."""
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{source}: larger than {MAX_BYTES >> 10} KiB: store long texts and data in other files")
    if _DEEP_KEY.search(_COMMENT_OR_STRING.sub("_", text)):
        raise ConfigError(_too_deep(source))
    try:
        table: TomlTable = _spell_dates(tomllib.loads(text))
    except RecursionError:
        raise ConfigError(_too_deep(source)) from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError as error:  # Python's own limit on digits
        raise ConfigError(f"{source}: a number is too long: integers end at {MAX_INTEGER}") from error
    _refuse_deep(table, source=source)
    return table


def _refuse_odd_numbers(value: Any, *, source: str, trail: tuple[str, ...] = ()) -> None:
    """Refuse numbers that JSON cannot hold: jobs read the recipe as JSON."""
    place = ": ".join([source, ".".join(trail)] if trail else [source])
    match value:
        case dict():
            for key, inner in value.items():
                _refuse_odd_numbers(inner, source=source, trail=(*trail, key))
        case list():
            for index, inner in enumerate(value):
                _refuse_odd_numbers(inner, source=source, trail=(*trail, str(index)))
        case float() if not math.isfinite(value):
            raise ConfigError(f"{place} = {value}: give a finite number" if trail else f"{place}: give a finite number")
        case int() if not MIN_INTEGER <= value <= MAX_INTEGER:
            raise ConfigError(f"{place}: the integer is too large: integers end at {MAX_INTEGER}")


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


def _list_replaced(trail: tuple[str, ...]) -> Iterable[tuple[str, ...]]:
    """Return the keys that are dropped when a child of `extends`, or a setting, sets this one.

    Options are arguments of one function, and another function may not accept them; the same holds for what describes
    a model, which has a path or is tiny.
    """
    match trail:
        case ("domains", name, "env"):
            return (*trail[:-1], "options"), ("evaluation", "options", name)
        case ("domains", _, "reward"):
            return ((*trail[:-1], "reward_options"),)
        case ("train", "pipeline", _, "function"):
            return ((*trail[:-1], "options"),)
        case ("model", "path") | ("judge", _, "path"):
            return [(*trail[:-1], key) for key in ("tiny", "num_params", "config")]
        case ("model", "tiny") | ("judge", _, "tiny"):
            return ((*trail[:-1], "path"),)
    return ()


def _takes_any_key(trail: tuple[str, ...]) -> bool:
    """Return whether a table is one of options and the like, which an empty one replaces."""
    match trail:
        case ("domains", _, "options" | "reward_options") | ("train", "pipeline", _, "options"):
            return True
        case ("model", "config" | "chat_template_kwargs") | ("judge", _, "config" | "chat_template_kwargs"):
            return True
        case ("evaluation", "options", _):
            return True
    return False


def _list_trails(table: TomlTable, *, trail: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in table.items():
        yield (*trail, key)
        if isinstance(value, dict):
            yield from _list_trails(value, trail=(*trail, key))


def _drop_replaced(table: TomlTable, over: TomlTable) -> None:
    """Drop what is in a table and that the keys of another, which is merged into it, replace."""
    for trail in _list_trails(over):
        for *path, key in _list_replaced(trail):
            inner: Any = table
            for part in path:
                inner = inner.get(part) if isinstance(inner, dict) else None
            if isinstance(inner, dict):
                inner.pop(key, None)


def _merge_tables(base: TomlTable, over: TomlTable, *, trail: tuple[str, ...] = ()) -> TomlTable:
    merged = dict(base)
    for key, value in over.items():
        old, inner = merged.get(key), (*trail, key)
        if isinstance(old, dict) and isinstance(value, dict) and (value or not _takes_any_key(inner)):
            merged[key] = _merge_tables(old, value, trail=inner)
        else:
            merged[key] = value
    return merged


def _parse_setting(setting: str, *, label: str) -> tuple[tuple[str, ...], Any]:
    """Return the key and the value of one `dotted.key=value`; a value that is not TOML is plain text."""
    parts, equals, text = _split_setting(setting)
    if not equals or not all(parts):
        raise ConfigError(f"{label}: expected key=value, such as -s rollout.group_size=16")
    if len(parts) > MAX_DEPTH:
        raise ConfigError(_too_deep(label))
    try:
        text.encode()
        value = _parse_text(f"value = {text}", source=label)["value"]
    except UnicodeEncodeError:
        raise ConfigError(f"{label}: not UTF-8 text") from None
    except tomllib.TOMLDecodeError:
        return parts, text
    _refuse_odd_numbers(value, source=label)
    return parts, value


def _apply_setting(table: TomlTable, key: tuple[str, ...], value: Any, *, label: str) -> None:
    for part in key[:-1]:
        inner = table.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{label}: {part!r} is {_show_value(inner)}, not a table: leave out what follows it")
        table = inner
    table[key[-1]] = value


def _nest_value(key: tuple[str, ...], value: Any) -> TomlTable:
    """Return a table with nothing but this key."""
    for part in reversed(key):
        value = {part: value}
    table: TomlTable = value
    return table


def _split_setting(setting: str) -> tuple[tuple[str, ...], str, str]:
    """Return the parts of the key, the equals sign or nothing, and the text of the value; quoted parts are whole."""
    parts, at, sign = [], 0, "."
    while sign == ".":
        found = _KEY_PART.match(setting, at)
        assert found is not None
        part = found[0].strip()
        if part.startswith(("'", '"')):
            with contextlib.suppress(tomllib.TOMLDecodeError):
                part = next(iter(tomllib.loads(f"{part} = 0")))
        parts.append(part)
        at, sign = found.end() + 1, setting[found.end() : found.end() + 1]
    return tuple(parts), sign, setting[at:]


def _label_setting(setting: str) -> str:
    from hpcrl.system.terminal import escape_to_one_line  # late: it imports rich, and most commands have no settings

    return f"-s {_shorten(escape_to_one_line(setting))}"


def name_setting(message: str, settings: Sequence[str]) -> str:
    """Return a message about a key with the setting, if it has set that key, first; one that has a source stays."""
    if message.startswith("-s ") or re.match(r"[^:]*\.toml: ", message):
        return message
    for find_mention in (_find_key, _find_table):
        found = {
            setting: find_mention(_split_setting(setting.removeprefix("site."))[0], message) for setting in settings
        }
        mentions = [(at, setting) for setting, at in found.items() if at is not None]
        if mentions:
            return f"{_label_setting(min(mentions)[1])}: {message}"
    return message


def _find_key(parts: tuple[str, ...], message: str) -> int | None:
    """Return where a message names a key, or one below it; a single word is a key only as a table."""
    key = re.escape(".".join(parts))
    found = re.search(rf"(?<![\w./-]){key}(?![\w-])" if parts[1:] else rf"\[{key}[.\]]|(?<![\w./-]){key}\.\w", message)
    return None if found is None else found.start()


def _find_table(parts: tuple[str, ...], message: str) -> int | None:
    """Return where a message names a table above a key, if it has the last part of the key too."""
    if not re.search(rf"(?<![\w.-]){re.escape(parts[-1])}(?![\w.-])", message):
        return None
    tables = (re.escape(".".join(parts[:num])) for num in range(len(parts) - 1, 1, -1))
    found = (re.search(rf"(?<![\w./-]){table}(?![\w-]|\.\w)", message) for table in tables)
    return next((one.start() for one in found if one is not None), None)


def _show_value(value: Any) -> str:
    return _shorten(repr(value))


def _shorten(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}..."


def _find_unknown(
    value: Any, kind: Any, *, trail: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Iterable[str]]]:
    """Yield the keys of a table that a struct does not have, each with those that it has there."""
    info = kind if isinstance(kind, msgspec.inspect.Type) else msgspec.inspect.type_info(kind)
    match info:
        case msgspec.inspect.StructType(fields=fields) if isinstance(value, dict):
            known = {field.encode_name: field.type for field in fields}
            for key, inner in value.items():
                if key not in known:
                    yield (*trail, key), known
                else:
                    yield from _find_unknown(inner, known[key], trail=(*trail, key))
        case msgspec.inspect.DictType(value_type=value_type) if isinstance(value, dict):
            for key, inner in value.items():
                yield from _find_unknown(inner, value_type, trail=(*trail, key))
        case msgspec.inspect.ListType(item_type=item_type) if isinstance(value, list):
            for index, inner in enumerate(value):
                yield from _find_unknown(inner, item_type, trail=(*trail, str(index)))
        case msgspec.inspect.UnionType(types=types):
            for member in types:
                yield from _find_unknown(value, member, trail=trail)
        case _:
            pass


def _find_missing(value: Any, kind: Any, *, trail: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the keys without a default that a table lacks, each with what belongs there."""
    info = kind if isinstance(kind, msgspec.inspect.Type) else msgspec.inspect.type_info(kind)
    match info:
        case msgspec.inspect.StructType(fields=fields) if isinstance(value, dict):
            for field in fields:
                inner = (*trail, field.encode_name)
                if field.encode_name in value:
                    yield from _find_missing(value[field.encode_name], field.type, trail=inner)
                elif field.required and isinstance(field.type, msgspec.inspect.StructType):
                    yield from list(_find_missing({}, field.type, trail=inner)) or [(inner, "a table")]
                elif field.required:
                    yield inner, _name_type(field.type)
        case msgspec.inspect.DictType(value_type=value_type) if isinstance(value, dict):
            for key, inner_value in value.items():
                yield from _find_missing(inner_value, value_type, trail=(*trail, key))
        case msgspec.inspect.UnionType(types=types) if isinstance(value, dict):
            for member in types:
                yield from _find_missing(value, member, trail=trail)
        case _:
            pass


def _name_type(info: msgspec.inspect.Type) -> str:
    names: tuple[tuple[type[msgspec.inspect.Type], str], ...] = (
        (msgspec.inspect.IntType, "an integer"),
        (msgspec.inspect.FloatType, "a number"),
        (msgspec.inspect.StrType, "a string"),
        (msgspec.inspect.LiteralType, "one of some strings"),
        (msgspec.inspect.DictType, "a table"),
    )
    return next((name for kind, name in names if isinstance(info, kind)), "a value")


def _round_whole_numbers(value: Any, kind: Any) -> None:
    """Replace whole numbers such as 8.2e9, in place, where only an integer is taken."""
    info = kind if isinstance(kind, msgspec.inspect.Type) else msgspec.inspect.type_info(kind)
    match info:
        case msgspec.inspect.StructType(fields=fields) if isinstance(value, dict):
            for field in fields:
                inner = value.get(field.encode_name)
                if type(inner) is float and inner.is_integer() and _takes_integer_only(field.type):
                    value[field.encode_name] = int(inner)
                else:
                    _round_whole_numbers(inner, field.type)
        case msgspec.inspect.DictType(value_type=value_type) if isinstance(value, dict):
            for inner in value.values():
                _round_whole_numbers(inner, value_type)
        case msgspec.inspect.UnionType(types=types):
            for member in types:
                _round_whole_numbers(value, member)
        case _:
            pass


def _takes_integer_only(info: msgspec.inspect.Type) -> bool:
    types = info.types if isinstance(info, msgspec.inspect.UnionType) else (info,)
    kinds = {type(one) for one in types}
    return msgspec.inspect.IntType in kinds and msgspec.inspect.FloatType not in kinds


def _find_namesakes(name: str, kind: Any, *, trail: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the keys of this name in the tables of a struct."""
    info = kind if isinstance(kind, msgspec.inspect.Type) else msgspec.inspect.type_info(kind)
    members = info.types if isinstance(info, msgspec.inspect.UnionType) else (info,)
    for member in members:
        if not isinstance(member, msgspec.inspect.StructType) or len(trail) > MAX_DEPTH:
            continue
        for field in member.fields:
            inner = (*trail, field.encode_name)
            if field.encode_name == name:
                yield ".".join(inner)
            yield from _find_namesakes(name, field.type, trail=inner)


def _explain_unknown_key(source: str, trail: Sequence[str], known: Iterable[str], kind: type[msgspec.Struct]) -> str:
    where = ".".join(trail)
    if where in RENAMED_KEYS:
        return f"{source}: {where!r} is now called {RENAMED_KEYS[where]!r}: use the new name"
    if (advice := _find_advice(trail)) is not None:
        return f"{source}: {where!r} was removed: {advice}"
    names = sorted(known)
    table = f"[{'.'.join(trail[:-1])}]" if trail[1:] else f"a {kind.__name__.lower()}"
    namesakes = [] if trail[1:] else [*_find_namesakes(trail[-1], kind)]  # its table may have been left out
    hint = suggest_name(trail[-1], namesakes, cutoff=0.0) or suggest_name(trail[-1], names)
    return f"{source}: unknown key {where!r}: {hint}{table} takes {', '.join(names)}"


def _find_advice(trail: Sequence[str]) -> str | None:
    """Return what to write instead of a key that was removed."""
    for key, advice in REMOVED_KEYS.items():
        parts = key.split(".")
        if len(parts) == len(trail) and all(part in ("*", name) for part, name in zip(parts, trail, strict=True)):
            return advice
    return None


MIN_PREFIX_CHARS = 3


def suggest_name(name: str, names: Sequence[str], *, cutoff: float = 0.6) -> str:
    """Return "did you mean ...? " with the one or two names that start so, or the closest; empty if none is close."""
    longer = [known for known in names if len(name) >= MIN_PREFIX_CHARS and known.startswith(name)]
    close = longer if 1 <= len(longer) <= 2 else difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
    return f"did you mean {' or '.join(map(repr, close))}? " if close else ""


def _explain_error(message: str, layered: LayeredTable, kind: type[msgspec.Struct]) -> str:
    """Rewrite msgspec's "Expected `int`, got `str` - at `$.a.b`" with the key first, and add the value seen."""
    found = re.fullmatch(r"(?P<what>.*?)(?: - at (?P<key>`key` in )?`\$\.?(?P<trail>.*)`)?", message, re.DOTALL)
    assert found is not None
    what = _translate_types(found["what"])
    for pattern, meaning in PATTERN_MEANINGS.items():
        what = what.replace(f"text matching regex {pattern!r}", meaning)
    trail = [part for part in re.split(r"[.\[\]]", (found["trail"] or "").replace("[...]", ".*")) if part]
    trail = _resolve_wildcard(trail, message, layered.table, kind)
    source = layered.find_source(trail)
    missing = re.search(r"Object missing required field (\S+)", what)
    if missing:
        return f"{layered.file}: {'.'.join([*trail, missing[1]])}: missing; it has no default, so add it"
    seen: Any = layered.table
    for part in trail:
        if isinstance(seen, dict) and part in seen:
            seen = seen[part]
        elif isinstance(seen, list) and part.isdigit() and int(part) < len(seen):
            seen = seen[int(part)]
        else:
            return f"{source}: {'.'.join(trail)}: {what}"
    if found["key"] and isinstance(seen, dict):
        wrong = [
            key for key in seen for pattern in PATTERN_MEANINGS if pattern in message and not re.match(pattern, key)
        ]
        return f"{source}: {'.'.join(trail)}: {what[:1].lower()}{what[1:]} (seen: {', '.join(map(_show_value, wrong))})"
    if what.startswith("Invalid enum value"):
        types = list(_find_types(msgspec.inspect.type_info(kind), trail))
        names = [str(value) for one in types if isinstance(one, msgspec.inspect.LiteralType) for value in one.values]
        number = ", or a number" * any(isinstance(one, msgspec.inspect.FloatType) for one in types)
        hint = f"{suggest_name(str(seen), names)}it takes {', '.join(names)}{number}"
        return f"{source}: {'.'.join(trail)}: unknown value {_show_value(seen)}: {hint}"
    where = ".".join(trail)
    if (new_value := _find_new_value(where, seen)) is not None:
        return f'{source}: {where} = {_show_value(seen)} is now written "{new_value}": use the new value'
    place = f"{source}: {where}" if where else source
    return f"{place}: {what[:1].lower()}{what[1:]} (seen: {_show_value(seen)})"


def _translate_types(message: str) -> str:
    """Replace msgspec's names of types, as in "Expected `int | null`, got `str`", by those that `hpcrl help` has."""
    if not message.startswith("Expected"):
        return message.replace("`", "")
    names = [part.replace(" | null", "").replace(" | ", " or ") for part in message.split("`")]
    words = "|".join(TYPE_WORDS)
    names[1::2] = [re.sub(rf"\b({words})\b", lambda word: TYPE_WORDS[word[0]], name) for name in names[1::2]]
    return "".join(names)


def _find_types(info: msgspec.inspect.Type, trail: Sequence[str]) -> Iterator[msgspec.inspect.Type]:
    """Yield the types that the value at `trail` may have."""
    match info:
        case msgspec.inspect.UnionType(types=types):
            for member in types:
                yield from _find_types(member, trail)
        case _ if not trail:
            yield info
        case msgspec.inspect.Metadata(type=inner):
            yield from _find_types(inner, trail)
        case msgspec.inspect.StructType(fields=fields):
            for field in fields:
                if field.encode_name == trail[0]:
                    yield from _find_types(field.type, trail[1:])
        case msgspec.inspect.DictType(value_type=inner) | msgspec.inspect.ListType(item_type=inner):
            yield from _find_types(inner, trail[1:])


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


def format_toml(comment: str, top: Mapping[str, Any], tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the text of a file: its top level, then its tables; values are texts, numbers and lists of them."""
    blocks = [f"# {comment}\n" + _format_keys(top)]
    blocks += [f"[{name}]\n{_format_keys(table)}" for name, table in tables.items() if table]
    return "\n".join(blocks)


def _format_keys(table: Mapping[str, Any]) -> str:
    # JSON writes these values as TOML does
    return "".join(f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in table.items())


def flatten_table(table: Mapping[str, Any], trail: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings of a table with their dotted keys."""
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from flatten_table(value, f"{trail}{key}.")
        else:
            yield f"{trail}{key}", value
