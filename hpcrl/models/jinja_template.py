"""Compile chat templates as transformers does: a sandbox of Jinja with a few functions and tags of its dialect.

compile_template    a template that renders messages, or ConfigError
list_variables      the names of the variables that a template reads
GenerationTag       a block that transformers has for training
read_template_texts  the templates of a model directory, from any of the places where transformers saves them
DEFAULT_TEMPLATE, TOOLS_TEMPLATE  the names of those without tools, and with tools if there is one
"""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hpcrl.errors import ConfigError

TEMPLATE_FILE, SETTINGS_FILE = "chat_template.jinja", "tokenizer_config.json"
DEFAULT_TEMPLATE, TOOLS_TEMPLATE = "default", "tool_use"


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


def _make_environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
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
