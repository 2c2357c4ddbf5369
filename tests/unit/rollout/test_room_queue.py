"""Turns that wait for room: few are tried at a time, all in the end, and nobody is forgotten."""

import asyncio

import pytest

from hpcrl.rollout.routing.room_queue import MAX_REFUSALS, RoomQueue

NUM = 10 * MAX_REFUSALS


async def turns(held_back, room, tried, num=NUM):
    """So many wait; each takes one of `room` where there is one."""

    def attempt(number):
        tried.append(number)
        if not room:
            return None
        room.pop()
        return number

    waiting = [asyncio.create_task(held_back.wait(lambda number=number: attempt(number))) for number in range(num)]
    await asyncio.sleep(0)
    return waiting


def test_those_who_came_first_get_the_room_there_is():
    async def run():
        held_back, room, tried = RoomQueue(), [None] * 3, []
        waiting = await turns(held_back, room, tried)
        held_back.wake()
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        return sorted(task.result() for task in done), len(tried)

    assert asyncio.run(run()) == ([0, 1, 2], 3 + MAX_REFUSALS)


def test_one_wake_tries_few_however_often_it_is_asked_for():
    async def run():
        held_back, tried = RoomQueue(), []
        waiting = await turns(held_back, [], tried)
        for _ in range(100):
            held_back.wake()
        await asyncio.sleep(0)
        for task in waiting:
            task.cancel()
        return len(tried)

    assert asyncio.run(run()) == MAX_REFUSALS


def test_everybody_is_tried_in_the_end_and_served_once():
    async def run():
        held_back, room, tried = RoomQueue(), [], []
        waiting = await turns(held_back, room, tried)
        for _ in range(NUM // MAX_REFUSALS):
            held_back.wake()
            await asyncio.sleep(0)
        assert sorted(tried) == list(range(NUM))
        while not all(task.done() for task in waiting):
            room.append(None)
            held_back.wake()
            await asyncio.sleep(0)
        return sorted(task.result() for task in waiting), len(room)

    served, left = asyncio.run(run())
    assert served == list(range(NUM))
    assert left <= 1


def test_who_gave_up_takes_no_room():
    async def run():
        held_back, room, tried = RoomQueue(), [None], []
        first, second = await turns(held_back, room, tried, num=2)
        first.cancel()
        held_back.wake()
        return await second, tried

    assert asyncio.run(run()) == (1, [1])


def test_all_are_told_when_nobody_will_wake_them():
    async def run():
        held_back = RoomQueue()
        waiting = await turns(held_back, [], [], num=2)
        held_back.fail(OSError("gone"))
        with pytest.raises(OSError, match="gone"):
            await waiting[0]
        with pytest.raises(OSError, match="gone"):
            await waiting[1]

    asyncio.run(run())
