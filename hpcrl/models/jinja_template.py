"""Compile chat templates as transformers does: a sandbox of Jinja with a few functions and tags of its dialect.

compile_template    a template that renders messages, or ConfigError
list_variables      the names of the variables that a template reads
GenerationTag       a block that transformers has for training
read_template_text  the template of a model directory, from any of the places where transformers saves it
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


def read_template_text(model_dir: Path, settings: dict[str, Any]) -> str:
    """Read the template of a model, whose tokenizer has these settings; of several it is the one named `default`."""
    path = model_dir / TEMPLATE_FILE
    if path.is_file():
        return path.read_text()
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = {entry.get("name"): entry.get("template") for entry in template}
    if isinstance(template, dict):
        template = template.get("default")
    extra = model_dir / "additional_chat_templates" / "default.jinja"
    if template is None and extra.is_file():
        return extra.read_text()
    if not isinstance(template, str):
        raise ConfigError(
            f"{model_dir} has no chat template, neither in {TEMPLATE_FILE} nor in {SETTINGS_FILE}: "
            "set model.chat_template to a file with one"
        )
    return template


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
