"""The common part of all benches: a figure with its bar, the table, the JSON, the exit code."""

import argparse
import json
import os
import platform
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A measured value; figures with a bar are ratios of two values measured in the same run."""

    name: str
    value: float
    unit: str = "x"
    bar: float | None = None
    better: Literal["lower", "higher"] = "higher"

    @property
    def ok(self) -> bool:
        if self.bar is None:
            return True
        return self.value <= self.bar if self.better == "lower" else self.value >= self.bar


def machine() -> str:
    """Describe the machine well enough to place a figure, without private details."""
    return f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"


def main(
    name: str,
    measure: Callable[..., list[Figure]],
    *,
    add_options: Callable[[argparse.ArgumentParser], None] | None = None,
) -> int:
    """Run a bench from the command line; return 1 if a bar is missed.

    `measure` takes whether this is the long run, and the arguments if the bench has options. At SIGTERM it ends as
    after an error, so that the campaigns and labs that it has started are removed.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parser = argparse.ArgumentParser(
        prog=f"python -m bench.{name}",
        description=sys.modules["__main__"].__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--full", action="store_true", help="the long run")
    if add_options is not None:
        add_options(parser)
    arguments = parser.parse_args()
    from hpcrl.errors import HpcrlError
    from hpcrl.system.terminal import show_wait  # late: GPU sections share this module, and run without rich

    try:
        with show_wait(f"{name} is measured"):
            figures = measure(arguments.full) if add_options is None else measure(arguments.full, arguments)
    except (HpcrlError, OSError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    if arguments.json:
        listed = [asdict(figure) | {"ok": figure.ok} for figure in figures]
        print(json.dumps({"name": name, "machine": machine(), "figures": listed}))
    else:
        print(f"{name} ({machine()})")
        for figure in figures:
            print(f"  {figure.name:<52} {figure.value:>10.3g} {figure.unit:<8} {_verdict(figure)}")
    return 0 if all(figure.ok for figure in figures) else 1


def _verdict(figure: Figure) -> str:
    if figure.bar is None:
        return ""
    sign = "<=" if figure.better == "lower" else ">="
    return f"bar {sign} {figure.bar:g}: {'ok' if figure.ok else 'MISSED'}"
