"""Compile chat templates as transformers does: a sandbox of Jinja with a few functions and tags of its dialect.

compile_template    a template that renders messages, or ConfigError
render_template     a rendering that ends, whatever the template does
MAX_RENDER_S, MAX_RENDERED_CHARS, RENDER_WATCH_INTERVAL_S  limits
list_variables      the names of the variables that a template reads
GenerationTag       a block that transformers has for training
read_template_texts  the templates of a model directory, from any of the places where transformers saves them
DEFAULT_TEMPLATE, TOOLS_TEMPLATE  the names of those without tools, and with tools if there is one
"""

import ctypes
import itertools
import json
import threading
import time
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hpcrl.errors import ConfigError, TemplateLimitError

TEMPLATE_FILE, SETTINGS_FILE = "chat_template.jinja", "tokenizer_config.json"
DEFAULT_TEMPLATE, TOOLS_TEMPLATE = "default", "tool_use"
MAX_RENDER_S = 3.0
"""The most CPU time of a rendering; a conversation of 200 turns takes some milliseconds."""
MAX_RENDERED_CHARS = 1 << 26
RENDER_WATCH_INTERVAL_S = 0.5


class GenerationTag(Extension):
    """The block `{% generation %}`, which marks what a model generated; here it is rendered like any other text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        start = next(parser.stream)
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=start.lineno)


def compile_template(template: str, *, source: Path) -> jinja2.Template:
    """Compile a template; ConfigError if it is not one."""
    try:
        compiled = _make_environment().from_string(template)
    except (jinja2.TemplateError, RecursionError) as error:
        raise ConfigError(f"{source}: its chat template cannot be compiled: {error}") from error
    # A plain dict: it is copied for every rendering, and jinja's ChainMap is slow.
    compiled.globals = dict(compiled.globals)
    return compiled


def render_template(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """Render a template; TemplateLimitError if it takes too long: other episodes of the process wait meanwhile."""
    global _watch
    if _watch is None or not _watch.is_alive():  # a child of a fork has none
        _watch = threading.Thread(target=_watch_renderings, name="templates", daemon=True)
        _watch.start()
    number, thread = next(_numbers), threading.get_ident()
    clock = time.pthread_getcpuclockid(thread)
    try:
        _renderings[number] = _Rendering(thread, clock, time.clock_gettime(clock) + MAX_RENDER_S)
        try:
            rendered = template.render(variables)
        except _RenderTimeout:
            raise
        except BaseException:
            _end_rendering(number)
            raise
        _end_rendering(number)
        return rendered
    except _RenderTimeout:
        raise TemplateLimitError(f"did not render a conversation in {MAX_RENDER_S:g} s") from None


class _RenderTimeout(BaseException):
    """A rendering took too long; no template and no filter catches this."""


class _Rendering(NamedTuple):
    """A rendering in progress."""

    thread: int
    clock: int
    """The clock of the thread's CPU time."""
    end: float
    """The time of that clock at which it is stopped."""


_numbers = itertools.count()
_renderings: dict[int, _Rendering] = {}
"""The renderings in progress; whoever takes one out, its own thread or the watch, ends it."""
_watch: threading.Thread | None = None


def _end_rendering(number: int) -> None:
    if _renderings.pop(number, None) is None:
        while True:  # the watch has taken it out, and its exception comes at any moment
            time.sleep(0.01)


def _watch_renderings() -> NoReturn:
    """Raise an exception in each thread whose rendering takes too long."""
    raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
    while True:
        time.sleep(RENDER_WATCH_INTERVAL_S)
        for number, rendering in list(_renderings.items()):
            try:
                is_late = time.clock_gettime(rendering.clock) > rendering.end
            except OSError:  # the thread has ended
                continue
            if is_late and _renderings.pop(number, None) is not None:
                raise_in(ctypes.c_ulong(rendering.thread), ctypes.py_object(_RenderTimeout))


def list_variables(template: str) -> list[str]:
    """Return the names of the variables that a template reads and does not set itself, sorted."""
    environment = _make_environment()
    return sorted(meta.find_undeclared_variables(environment.parse(template)) - set(environment.globals))


def read_template_texts(model_dir: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Read the templates of a model, whose tokenizer has these settings, by name; one is the default.

    The settings are not read where the default is a file, as in transformers.
    """
    main, extra = model_dir / TEMPLATE_FILE, model_dir / "additional_chat_templates"
    files = {
        DEFAULT_TEMPLATE: main if main.is_file() else extra / "default.jinja",
        TOOLS_TEMPLATE: extra / "tool_use.jinja",
    }
    stored = None if main.is_file() else settings.get("chat_template")
    if isinstance(stored, list):
        stored = {entry.get("name"): entry.get("template") for entry in stored}
    elif not isinstance(stored, dict):
        stored = {DEFAULT_TEMPLATE: stored}
    texts = {name: path.read_text() for name, path in files.items() if path.is_file()}
    texts |= {name: text for name, text in stored.items() if isinstance(text, str)}
    if DEFAULT_TEMPLATE not in texts:
        raise ConfigError(
            f"{model_dir} has no chat template, neither in {TEMPLATE_FILE} nor in {SETTINGS_FILE}: "
            "set model.chat_template to a file with one"
        )
    return texts


class _LimitedSandbox(ImmutableSandboxedEnvironment):
    """A sandbox whose texts have a limit, however a template makes them longer."""

    intercepted_binops = frozenset(["*", "**"])

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        joined, num_chars = [], 0
        for piece in pieces:
            num_chars += len(piece)
            _check_size(num_chars)
            joined.append(piece)
        return "".join(joined)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, int) and isinstance(other, str | list | tuple):
                    _check_size(one * len(other))
        elif isinstance(right, int):
            _check_size(right)
        return super().call_binop(context, operator, left, right)


def _check_size(num_chars: int) -> None:
    if num_chars > MAX_RENDERED_CHARS:
        raise TemplateLimitError(f"renders a conversation to more than {MAX_RENDERED_CHARS >> 20} Mi characters")


def _make_environment() -> ImmutableSandboxedEnvironment:
    environment = _LimitedSandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag]
    )
    environment.globals |= {"raise_exception": _raise_template_error, "strftime_now": _format_now}
    environment.filters["tojson"] = _to_json
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Encode JSON as transformers does: jinja's own filter escapes < and > for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _format_now(form: str) -> str:
    return datetime.now().strftime(form)


def _raise_template_error(message: str) -> None:
    raise jinja2.TemplateError(message)
