"""The way in which a model writes a tool call as text, described to it and written for it.

CallForm    a form: its texts, and a call in it
PLAIN_CALL  the form that most models were taught
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple


class CallForm(NamedTuple):
    """A form of tool calls: NAME stands for the tool, ARGUMENTS for all arguments in JSON, KEY and VALUE for one."""

    before: str
    argument: str = "ARGUMENTS"
    after: str = ""
    separator: str = ""
    """The text between two arguments."""
    is_python: bool = False
    """True if values are written as in Python."""

    @property
    def text(self) -> str:
        """The form as it is described to a model, with one argument."""
        return self.before + self.argument + self.after

    def write(self, name: str, arguments: Any) -> str:
        """Return a call; arguments that are not an object are written as they are."""
        return self.before.replace("NAME", name) + self._write_arguments(arguments) + self.after

    def _write_arguments(self, arguments: Any) -> str:
        if not isinstance(arguments, Mapping):
            return arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
        if self.argument == "ARGUMENTS":
            return json.dumps(arguments, ensure_ascii=False)
        opening, _, rest = self.argument.partition("KEY")
        middle, _, closing = rest.partition("VALUE")
        return self.separator.join(
            f"{opening}{key}{middle}{self._write_value(value)}{closing}" for key, value in arguments.items()
        )

    def _write_value(self, value: Any) -> str:
        if self.is_python:
            return repr(value)
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


PLAIN_CALL = CallForm('<tool_call>\n{"name": "NAME", "arguments": ', after="}\n</tool_call>")
"""The form of Hermes."""
