"""Write ASCII where the user's locale is C: Python writes UTF-8 there, which such a terminal does not show.

follow_locale    write to stdout what the locale can show, if there is one; a question mark stands for the rest
is_ascii_only    whether that is ASCII alone
"""

import io
import os
import sys
from collections.abc import Mapping

_PLAIN_LOCALES = ("C", "POSIX")
_COERCED_LOCALE = "C.UTF-8"


def follow_locale() -> None:
    """Write ASCII to stdout if the locale has nothing else, and to nowhere if it was closed before the start."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115 - a device, open until the end
        os.set_inheritable(sys.stdout.fileno(), True)  # the processes that it starts have a stdout too
    if is_ascii_only(os.environ) and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="ascii", errors="replace")


def is_ascii_only(environment: Mapping[str, str]) -> bool:
    """Return whether the first locale that is set is C, and Python's encoding was not chosen.

    In locale C Python itself sets LC_CTYPE to C.UTF-8, also for the programs that it starts.
    """
    if environment.get("PYTHONIOENCODING") or environment.get("PYTHONUTF8") == "1":
        return False
    names = [environment.get(name, "") for name in ("LC_ALL", "LC_CTYPE", "LANG")]
    if names[1] == _COERCED_LOCALE and names[2] in _PLAIN_LOCALES:
        names[1] = ""
    return next(filter(None, names), "") in _PLAIN_LOCALES
