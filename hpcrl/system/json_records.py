"""Decode JSON as a type; everything that is wrong with a text is one error.

decode_record   the value, or msgspec.DecodeError
"""

from typing import Any, TypeVar, overload

import msgspec

T = TypeVar("T")


@overload
def decode_record(data: bytes | str) -> Any: ...
@overload
def decode_record(data: bytes | str, kind: type[T]) -> T: ...
def decode_record(data: bytes | str, kind: Any = Any) -> Any:
    """Decode JSON; what is nested too deep, or is not UTF-8, is a DecodeError too."""
    try:
        return msgspec.json.decode(data, type=kind)
    except RecursionError:
        raise msgspec.DecodeError("it is nested too deep") from None
    except UnicodeError as error:
        raise msgspec.DecodeError(str(error)) from None
