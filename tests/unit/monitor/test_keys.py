"""Keys while a campaign is watched, on a real pseudo-terminal."""

import os
import pty
import subprocess
import sys
import termios
from collections.abc import Iterator

import pytest

from hpcrl.monitor.keys import KeyReader


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    user, process = pty.openpty()
    settings = termios.tcgetattr(process)
    settings[3] &= ~(termios.ICANON | termios.ECHO)
    termios.tcsetattr(process, termios.TCSANOW, settings)
    yield user, process
    os.close(user)
    os.close(process)


def test_a_key_chooses_a_page_and_the_same_key_leaves_it(terminal: tuple[int, int]) -> None:
    user, process = terminal
    keys = KeyReader(fd=process)
    pages = []
    for key in (b"a", b"a", b"E", b"?", b"x", b"o"):
        os.write(user, key)
        keys.wait(5.0)
        pages.append(keys.page)
    assert pages == ["advisories", "overview", "events", "help", "help", "overview"]


@pytest.mark.parametrize("sent", [b"\x1b[A", b"\x1bOQ", b"\x1b[15~", b"\x1bq"])
def test_an_arrow_or_a_function_key_or_alt_with_a_letter_is_no_letter(terminal: tuple[int, int], sent: bytes) -> None:
    user, process = terminal
    keys = KeyReader(fd=process)
    os.write(user, sent)
    keys.wait(5.0)
    assert keys.page == "overview"


def test_the_key_that_quits_is_as_an_interrupt(terminal: tuple[int, int]) -> None:
    user, process = terminal
    os.write(user, b"q")
    with pytest.raises(KeyboardInterrupt):
        KeyReader(fd=process).wait(5.0)


def test_a_terminal_that_is_gone_is_waited_for_no_more() -> None:
    user, process = pty.openpty()
    keys = KeyReader(fd=process)
    os.close(user)
    keys.wait(5.0)
    assert not keys.has_keys
    os.close(process)


def test_without_a_terminal_no_key_is_read() -> None:
    keys = KeyReader()
    keys.wait(0.0)
    assert not keys.has_keys


def test_a_terminal_that_is_not_that_of_the_session_sends_no_keys() -> None:
    """As in a container, or after setsid: such a process may write to the terminal, and has no group in front."""
    user, process = pty.openpty()
    code = "from hpcrl.monitor.keys import open_keys\nwith open_keys(is_wanted=True) as keys: print(keys.has_keys)"
    done = subprocess.run([sys.executable, "-c", code], stdin=process, start_new_session=True, capture_output=True)
    os.close(user)
    os.close(process)
    assert (done.returncode, done.stdout.strip()) == (0, b"False"), done.stderr
