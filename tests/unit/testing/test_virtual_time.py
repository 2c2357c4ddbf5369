"""Virtual time: unchanged asyncio code on a clock that jumps."""

import asyncio

import pytest

from hpcrl.testing.virtual_time import StuckLoopError, run_virtual


def test_sleeping_moves_the_clock_by_that_time():
    async def main():
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(3600)


def test_timers_end_in_the_order_of_their_times():
    async def main():
        ended = []

        async def sleeper(seconds):
            await asyncio.sleep(seconds)
            ended.append((seconds, round(asyncio.get_running_loop().time(), 6)))

        await asyncio.gather(*(sleeper(seconds) for seconds in (3, 1, 2.5)))
        return ended

    assert run_virtual(main()) == [(1, 1), (2.5, 2.5), (3, 3)]


def test_a_timeout_is_a_timer_like_any_other():
    async def main():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(90):
                await asyncio.sleep(100)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(90)


def test_work_for_a_thread_is_done_at_once():
    async def main():
        return await asyncio.to_thread(sum, [1, 2]), asyncio.get_running_loop().time()

    assert run_virtual(main()) == (3, 0.0)


def test_an_error_of_work_for_a_thread_is_raised_where_it_is_awaited():
    async def main():
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 / 0)

    run_virtual(main())


def test_a_program_in_which_every_task_waits_is_stopped_by_an_error():
    async def main():
        await asyncio.sleep(5)
        await asyncio.Event().wait()

    with pytest.raises(StuckLoopError, match="at 5 s every task waits"):
        run_virtual(main())
