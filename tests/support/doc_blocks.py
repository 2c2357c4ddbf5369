"""The code blocks of documents, and the commands in them.

DocBlock, find_blocks    the blocks of a document
find_files       the files that it shows
list_commands            the commands of shell text: each as its words, without variables, redirections and comments
split_session            a `console` block as its commands and what each prints
follow_page              run the commands of a page, which must print what it shows
TUTORIAL                 the folder of its pages
find_missing             the lines of a page that were not printed, in their order
"""

import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from hpcrl.system.network import current_node

TUTORIAL = Path(__file__).resolve().parents[2] / "docs" / "tutorial"
BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ASSIGNMENT = re.compile(r"[A-Z_]+=")
FILE_NAME = re.compile(r"# (?:[\w.~-]+/)*([\w-]+\.(?:toml|py))\n")
PATH_WORD = re.compile(r"(?<![\w/.])/[\w./-]+")
NUMBER = re.compile(r"[-+]?\d[\d,.:]*")
DRAWING = re.compile(r"[\u2500-\u259f]+")
LEFT_OUT = "..."
SUBSTITUTION = re.compile(r"\$\(([^()]*)\)")


class DocBlock(NamedTuple):
    path: Path
    line: int
    language: str
    text: str


def find_blocks(path: Path, *languages: str) -> list[DocBlock]:
    """Return the blocks of a document in these languages; without one, all of them."""
    text = path.read_text()
    blocks = [DocBlock(path, text.count("\n", 0, at.start()) + 1, at[1], at[2]) for at in BLOCK.finditer(text)]
    return [block for block in blocks if not languages or block.language in languages]


def find_files(path: Path) -> dict[str, str]:
    """Return the files of a document by name, which the first line of a block has, perhaps with folders."""
    named = [(FILE_NAME.match(block.text), block.text) for block in find_blocks(path, "toml", "python")]
    return {name[1]: text for name, text in named if name}


def list_commands(text: str) -> Iterator[list[str]]:
    for line in text.replace("\\\n", " ").splitlines():
        for inner in SUBSTITUTION.findall(line):
            yield from list_commands(inner)
        words: list[str] = []
        tokens = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
        tokens.whitespace_split = True
        for token in tokens:
            if set(token) <= set("|&;"):
                yield from _strip_command(words)
                words = []
            else:
                words.append(token)
        yield from _strip_command(words)


def _strip_command(words: list[str]) -> Iterator[list[str]]:
    while words and ASSIGNMENT.match(words[0]):
        words = words[1:]
    redirections = [place for place, word in enumerate(words) if set(word) <= set("<>")]
    words = words[: min(redirections, default=len(words))]
    if words:
        yield words


def split_session(text: str) -> list[tuple[str, str]]:
    """Return each command of a session with what it prints; a line of dots alone stands for lines left out."""
    parts = re.split(r"^\$ ", text, flags=re.MULTILINE)
    assert not parts[0].strip(), parts[0]
    pairs = [part.partition("\n") for part in parts[1:]]
    return [(command, output) for command, _, output in pairs]


def follow_page(path: Path, run: Callable[[list[str]], str]) -> int:
    """Run every command of the sessions of a page; return how many there were."""
    sessions = [pair for block in find_blocks(path, "console") for pair in split_session(block.text)]
    for command, shown in sessions:
        [[program, *arguments]] = list_commands(command)
        assert program == "hpcrl", command
        printed = run(arguments)
        missing = find_missing(shown, printed)
        assert missing is None, f"{path.name}: {command} did not print, in its place: {missing}\n{printed}"
    return len(sessions)


def find_missing(shown: str, printed: str) -> str | None:
    """Return the first line of a page that was not printed; None if all were.

    Lines follow each other as shown, except where some are left out. Numbers, paths, drawings and this machine's name
    (`vm` on a page) may be others.
    """
    lines, place, may_skip = [_blur(line) for line in printed.splitlines()], 0, False
    for line in shown.splitlines():
        if line == LEFT_OUT:
            may_skip = True
            continue
        wanted = _blur(line)
        if may_skip:
            place = next((number for number in range(place, len(lines)) if lines[number] == wanted), len(lines))
        if place >= len(lines) or lines[place] != wanted:
            return line
        place, may_skip = place + 1, False
    return None if may_skip or not any(lines[place:]) else "nothing more"


def _blur(line: str) -> str:
    line = re.sub(rf"\b{re.escape(current_node())}\b", "vm", line)
    words = DRAWING.sub(" ", NUMBER.sub("#", PATH_WORD.sub("PATH", line)))
    return " ".join(words.split())
