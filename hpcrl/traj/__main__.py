"""`python -m hpcrl.traj ROOT ACTION ...`: what `hpcrl traj` starts, with the campaign's directory found."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrl.campaign_dir.paths import RunDir
from hpcrl.errors import HpcrlError
from hpcrl.system.exit_codes import EXIT_INTERRUPTED, EXIT_USAGE
from hpcrl.system.files import read_json
from hpcrl.traj.arguments import add_commands

if TYPE_CHECKING:
    from hpcrl.traj.history import History

NUM_TOLD = 5


def main(words: Sequence[str]) -> int:
    """Run one command; what a user can mend is one message and exit code 2."""
    root, *rest = words
    parser = argparse.ArgumentParser(prog="hpcrl traj")
    add_commands(parser)
    arguments = parser.parse_args(rest)
    try:
        code = _run(arguments, RunDir(Path(root)))
        sys.stdout.flush()
    except HpcrlError as error:
        return _refuse(str(error))
    except ModuleNotFoundError as error:
        return _refuse(f"{sys.executable} cannot read trajectories without {error.name}: pip install 'hpcrl[local]'")
    except BrokenPipeError:  # the reader of our output went away, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return code


def _run(arguments: argparse.Namespace, run: RunDir) -> int:
    if arguments.action == "verify":
        from hpcrl.traj.verify import verify

        return verify(run, as_json=arguments.json)
    from hpcrl.traj.history import History

    history = History(run, spools=(arguments.spool,)) if arguments.spool else History(run)
    try:
        return _read(arguments, history)
    finally:
        _tell(history)


def _tell(history: "History") -> None:
    """Say what was passed over."""
    from hpcrl.system.terminal import complain

    problems = list(history.problems.values())
    for problem in problems[:NUM_TOLD]:
        complain(problem)
    if problems:
        more = f"and {len(problems) - NUM_TOLD:,} more " if len(problems) > NUM_TOLD else ""
        complain(f"{more}passed over: `hpcrl traj verify {history.run.name}` looks at everything")


def _read(arguments: argparse.Namespace, history: "History") -> int:
    from hpcrl.traj import history as wanted

    which = wanted.from_arguments(arguments, known_domains=_domains(history.run))
    match arguments.action:
        case "ls":
            from hpcrl.traj.listing import list_newest

            return list_newest(history, which, limit=arguments.limit, as_json=arguments.json)
        case "show":
            from hpcrl.traj import show

            found = show.find(history, which, text=arguments.id, best=arguments.best, worst=arguments.worst)
            return show.show(found, run=history.run, tokens=arguments.tokens, as_json=arguments.json)
        case "stats":
            from hpcrl.traj.stats import show_stats

            return show_stats(history, which, as_json=arguments.json)
    from hpcrl.traj.export import export

    return export(history, which, target=arguments.target, kind=arguments.format, force=arguments.force)


def _domains(run: RunDir) -> list[str]:
    """Those of the recipe, as far as it can be read."""
    try:
        return list(read_json(run.recipe)["domains"])
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _refuse(message: str) -> int:
    print(f"hpcrl: {message}".encode(errors="replace").decode(), file=sys.stderr)  # noqa: T201
    return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
