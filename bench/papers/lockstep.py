"""A rollout in lockstep on simulated engines (`play_in_lockstep`), which no campaign of hpcrl plays."""

from collections.abc import Sequence

from hpcrl.hardware.cost_model import WorkerSpeed
from hpcrl.simulation.clock import EventQueue
from hpcrl.simulation.engine import EngineRow, FluidEngine
from hpcrl.simulation.workload import EpisodeScript


def play_in_lockstep(
    episodes: Sequence[EpisodeScript], *, speed: WorkerSpeed, num_engines: int, max_batch: int
) -> float:
    """Return the seconds until all have ended, if each turn waits for all answers, then for all environments.

    An episode stays on its engine, the next one is on the next engine.
    """
    queue = EventQueue()
    engines = [FluidEngine(queue, speed, max_batch=max_batch) for _ in range(num_engines)]
    contexts = [0] * len(episodes)
    _pass_time(queue, max(one.reset_s for one in episodes))
    for number in range(max(len(one.turns) for one in episodes)):
        turns = {index: one.turns[number] for index, one in enumerate(episodes) if number < len(one.turns)}
        ended: list[EngineRow] = []
        for index, turn in turns.items():
            contexts[index] += turn.num_fresh
            row = EngineRow(str(index), num_prompt=contexts[index], num_new=turn.num_reply, on_end=ended.append)
            engines[index % num_engines].submit(row)
            contexts[index] += turn.num_reply
        _await_rows(queue, ended, num=len(turns))
        _pass_time(queue, max(turn.env_s for turn in turns.values()))
    return queue.now


def _await_rows(queue: EventQueue, rows: list[EngineRow], *, num: int) -> None:
    queue.run(is_done=lambda: len(rows) == num)


def _pass_time(queue: EventQueue, seconds: float) -> None:
    passed: list[bool] = []
    queue.call_later(seconds, lambda: passed.append(True))
    queue.run(is_done=lambda: bool(passed))
