"""Turns that wait for room: few are tried at a time, all in the end, and none is forgotten."""

import asyncio

import pytest

from hpcrl.rollout.routing.room_queue import MAX_REFUSALS, RoomQueue

NUM = 10 * MAX_REFUSALS


async def turns(room_queue, room, tried, num=NUM):
    """Start `num` waiting turns, each of which takes one entry of `room` if there is one."""

    def attempt(number):
        tried.append(number)
        if not room:
            return None
        room.pop()
        return number

    waiting = [asyncio.create_task(room_queue.wait(lambda number=number: attempt(number))) for number in range(num)]
    await asyncio.sleep(0)
    return waiting


def test_the_first_turns_get_the_room_there_is():
    async def run():
        room_queue, room, tried = RoomQueue(), [None] * 3, []
        waiting = await turns(room_queue, room, tried)
        room_queue.wake()
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        return sorted(task.result() for task in done), len(tried)

    assert asyncio.run(run()) == ([0, 1, 2], 3 + MAX_REFUSALS)


def test_one_wake_tries_few_however_often_it_is_asked_for():
    async def run():
        room_queue, tried = RoomQueue(), []
        waiting = await turns(room_queue, [], tried)
        for _ in range(100):
            room_queue.wake()
        await asyncio.sleep(0)
        for task in waiting:
            task.cancel()
        return len(tried)

    assert asyncio.run(run()) == MAX_REFUSALS


def test_every_turn_is_tried_in_the_end_and_served_once():
    async def run():
        room_queue, room, tried = RoomQueue(), [], []
        waiting = await turns(room_queue, room, tried)
        for _ in range(NUM // MAX_REFUSALS):
            room_queue.wake()
            await asyncio.sleep(0)
        assert sorted(tried) == list(range(NUM))
        while not all(task.done() for task in waiting):
            room.append(None)
            room_queue.wake()
            await asyncio.sleep(0)
        return sorted(task.result() for task in waiting), len(room)

    served, left = asyncio.run(run())
    assert served == list(range(NUM))
    assert left <= 1


def test_a_cancelled_turn_takes_no_room():
    async def run():
        room_queue, room, tried = RoomQueue(), [None], []
        first, second = await turns(room_queue, room, tried, num=2)
        first.cancel()
        room_queue.wake()
        return await second, tried

    assert asyncio.run(run()) == (1, [1])


def test_all_turns_fail_when_nothing_will_wake_them():
    async def run():
        room_queue = RoomQueue()
        waiting = await turns(room_queue, [], [], num=2)
        room_queue.fail(OSError("gone"))
        with pytest.raises(OSError, match="gone"):
            await waiting[0]
        with pytest.raises(OSError, match="gone"):
            await waiting[1]

    asyncio.run(run())
