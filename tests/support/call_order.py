"""The order in which a command reaches functions: `python -m tests.support.call_order ARGUMENT ...`, one JSON line.

Each entry is the path of a module in the repository and the name of a function, at its first call.
"""

import json
import os
import sys
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[2]


def main(arguments: list[str]) -> None:
    reached: dict[tuple[str, str], None] = {}
    prefix = f"{ROOT}{os.sep}"

    def note_call(frame: FrameType, event: str, value: object) -> None:
        del value
        if event == "call" and frame.f_code.co_filename.startswith(prefix):
            reached.setdefault((frame.f_code.co_filename.removeprefix(prefix), frame.f_code.co_name))

    from hpcrl.cli import main as run_command

    sys.setprofile(note_call)
    try:
        run_command(arguments)
    except SystemExit:
        pass
    finally:
        sys.setprofile(None)
    sys.stdout.write(f"\n{json.dumps(list(reached))}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
