"""What commands print with --json.

load_checked    load an output, after a check against its schema
"""

import json
from typing import Any

import jsonschema

from hpcrl.commands.schemas import make_schema


def load_checked(text: str, name: str) -> Any:
    """Return the value of an output; `name` is that of its schema."""
    value = json.loads(text)
    jsonschema.validate(value, make_schema(name))
    return value
