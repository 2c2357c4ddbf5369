"""Wake-ups end a wait early; nothing depends on one."""

import asyncio
import contextlib
import os
import resource
import socket

import pytest

from hpcrl.system.wakeups import WakeEvent, WakeListener, WakeSender

LONG_S = 30.0
"""A test may not take as long: a wait that ends was woken."""


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "wakeups"


@pytest.fixture
def listener(directory):
    listener = WakeListener(directory, "train-0", host="127.0.0.1")
    yield listener
    listener.close()


def test_a_sender_ends_the_wait_of_a_listener(directory, listener):
    WakeSender(directory, "train-").wake()
    assert listener.wait(LONG_S)


def test_a_process_with_thousands_of_open_files_can_wait(directory, listener):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], 2048), before[1]))
        for _ in range(1100):
            stack.callback(os.close, os.dup(0))
        many = WakeListener(directory, "train-1", host="127.0.0.1")
        stack.callback(many.close)
        assert many.fileno() > 1024
        assert not many.wait(0.0)
        WakeSender(directory, "train-1").wake()
        assert many.wait(LONG_S)


def test_a_listener_of_another_name_is_not_woken(directory, listener):
    WakeSender(directory, "reward-", "env-").wake()
    assert not listener.wait(0.0)


def test_a_local_sender_wakes_only_listeners_at_its_own_address(directory, listener):
    there = WakeListener(directory, "train-1", host="127.0.0.2")
    WakeSender(directory, "train-", host="127.0.0.1", is_local=True).wake()
    assert (listener.wait(LONG_S), there.wait(0.0)) == (True, False)
    there.close()


def test_several_wake_ups_end_one_wait(directory, listener):
    sender = WakeSender(directory, "train-")
    sender.wake()
    sender.wake()
    assert (listener.wait(LONG_S), listener.wait(0.0)) == (True, False)


def test_a_datagram_without_the_token_is_not_a_wake_up(listener):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        address = socket.socket(fileno=listener.fileno())
        other.sendto(b"x" * 2000, address.getsockname())
        address.detach()
    assert not listener.wait(0.2)


def test_a_listener_replaces_the_address_of_a_killed_one_of_its_name(directory, listener):
    second = WakeListener(directory, "train-0", host="127.0.0.1")
    WakeSender(directory, "train-").wake()
    assert (second.wait(LONG_S), len(list(directory.iterdir()))) == (True, 1)
    second.close()


def test_wake_ups_to_missing_and_to_invalid_addresses_are_left_out(directory, listener):
    WakeSender(directory.with_name("missing"), "train-").wake()
    for name in ("train-0@no-host@70000@t", "train-0@@x@t", "train-0", "train-0@127.0.0.1@-1@t"):
        (directory / name).touch()
    WakeSender(directory, "train-").wake()
    assert listener.wait(LONG_S)


def test_the_address_of_a_listener_is_for_its_owner_alone_and_goes_with_it(directory):
    listener = WakeListener(directory, "train-0", host="127.0.0.1")
    (path,) = directory.iterdir()
    assert (path.stat().st_mode & 0o77, directory.stat().st_mode & 0o77) == (0, 0)
    listener.close()
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize("source", ["inside", "thread", "process"])
def test_a_wait_of_an_event_loop_ends_early_whoever_wakes_it(directory, listener, source):
    async def run():
        event = WakeEvent()
        event.attach(listener)
        match source:
            case "inside":
                event.set()
            case "thread":
                await asyncio.to_thread(event.set_from_thread, asyncio.get_running_loop())
            case "process":
                WakeSender(directory, "train-").wake()
        woken = await event.wait(LONG_S), await event.wait(0.0)
        event.detach(listener)
        return woken

    assert asyncio.run(run()) == (True, False)
