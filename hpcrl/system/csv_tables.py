"""Refuse files that are not CSV in UTF-8, with what they seem to be.

refuse_bad_table    raise ConfigError for a file that cannot be read as CSV
guess_table_fault   what is wrong with a header in which columns are missing
"""

import contextlib
import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpcrl.errors import ConfigError


@contextlib.contextmanager
def refuse_bad_table(path: Path) -> Iterator[None]:
    """Raise ConfigError in place of the errors of a file that cannot be read as CSV."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a text in UTF-8: save it as CSV in UTF-8") from error
    except csv.Error as error:
        raise ConfigError(f"{path} is not valid CSV ({error}): give a table with one header line") from error


def guess_table_fault(header: Sequence[str]) -> str:
    """Return what is wrong with a table of which this is the header, if it seems not to be CSV."""
    if header and header[0].lstrip().startswith(("{", "[")):
        return "seems to be JSON: give CSV, a table with one header line"
    if len(header) == 1 and any(separator in header[0] for separator in ";\t|"):
        return f"has its columns not separated by commas: {header[0]!r:.80}"
    return ""
