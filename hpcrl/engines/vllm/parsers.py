"""vLLM's own parsers of tool calls and thoughts, by name: for `engine.tool_parser = "vllm:NAME"`.

load_tool_parser       a function from a text to its content and its calls
load_reasoning_parser  a function from a text to its thoughts and its content
check_parsers          raise ConfigError for names that this vLLM does not have
main                   the same as a command: python -m hpcrl.engines.vllm.parsers TOOL_PARSER REASONING_PARSER

They need vLLM, torch and transformers in the process: half a gigabyte, and seconds to start. Their errors are the
caller's, which may be any exception: they are programs of others.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hpcrl.config.recipe import AUTO_PARSER, VLLM_PARSER_PREFIX
from hpcrl.config.toml import suggest_name
from hpcrl.errors import ConfigError
from hpcrl.system.exit_codes import EXIT_DONE, EXIT_USAGE

ExtractCalls = Callable[[str, Sequence[dict[str, Any]]], tuple[str, list[tuple[str, str]]]]
"""A text and the request's tools give the content, and the names of calls with their arguments in JSON."""
ExtractThoughts = Callable[[str], tuple[str, str]]
"""A text gives its thoughts and its content."""


def load_tool_parser(name: str, model: Path) -> ExtractCalls:
    """Load the tool parser of vLLM with this name for a model's tokenizer."""
    check_parsers(tool_parser=VLLM_PARSER_PREFIX + name)
    from transformers import AutoTokenizer
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    tokenizer = AutoTokenizer.from_pretrained(str(model))
    make_parser: Any = ToolParserManager.get_tool_parser(name)

    def extract(text: str, tools: Sequence[dict[str, Any]]) -> tuple[str, list[tuple[str, str]]]:
        request = ChatCompletionRequest(model="", messages=[], tools=list(tools))
        found = make_parser(tokenizer, request.tools).extract_tool_calls(text, request)
        calls = [(call.function.name, call.function.arguments) for call in found.tool_calls]
        return found.content or "", calls

    return extract


def load_reasoning_parser(name: str, model: Path) -> ExtractThoughts:
    """Load the reasoning parser of vLLM with this name for a model's tokenizer."""
    check_parsers(reasoning_parser=VLLM_PARSER_PREFIX + name)
    from transformers import AutoTokenizer
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.reasoning import ReasoningParserManager

    tokenizer = AutoTokenizer.from_pretrained(str(model))
    make_parser: Any = ReasoningParserManager.get_reasoning_parser(name)
    request = ChatCompletionRequest(model="", messages=[])

    def extract(text: str) -> tuple[str, str]:
        reasoning, content = make_parser(tokenizer).extract_reasoning(text, request)
        return reasoning or "", content or ""

    return extract


def check_parsers(*, tool_parser: str = AUTO_PARSER, reasoning_parser: str = AUTO_PARSER) -> None:
    """Raise ConfigError for a parser "vllm:NAME" that this vLLM does not have; other names are not looked at."""
    if tool_parser.startswith(VLLM_PARSER_PREFIX):
        _require_vllm(f"engine.tool_parser = {tool_parser!r}")
        from vllm.tool_parsers import ToolParserManager

        _require_name("engine.tool_parser", tool_parser, ToolParserManager.list_registered())
    if reasoning_parser.startswith(VLLM_PARSER_PREFIX):
        _require_vllm(f"engine.reasoning_parser = {reasoning_parser!r}")
        from vllm.reasoning import ReasoningParserManager

        _require_name("engine.reasoning_parser", reasoning_parser, ReasoningParserManager.list_registered())


def main() -> int:
    try:
        check_parsers(tool_parser=sys.argv[1], reasoning_parser=sys.argv[2])
    except ConfigError as error:
        print(error, file=sys.stderr)  # noqa: T201 - the caller's message
        return EXIT_USAGE
    return EXIT_DONE


def _require_vllm(what: str) -> None:
    if find_spec("vllm") is None:
        raise ConfigError(f"{what} needs the package vllm, which is not installed here: install it, or name a family")


def _require_name(setting: str, name: str, names: Sequence[str]) -> None:
    if (own := name.removeprefix(VLLM_PARSER_PREFIX)) not in names:
        raise ConfigError(
            f"{setting} = {name!r} is not known to this vLLM: {suggest_name(own, names)}"
            f"it has {', '.join(sorted(names))}"
        )


if __name__ == "__main__":
    sys.exit(main())
