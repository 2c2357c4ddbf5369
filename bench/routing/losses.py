"""Split a run's time above the bound into losses, which add up to makespan / bound - 1.

    idle, idle in the drain           a worker had nothing to do
    batches not full, ...             steps that share their standing cost among fewer sequences than there are places
    prompts computed again            KV that was dropped, or left behind on another worker
    turns on hardware slower at them  than those that the bound gives them to, and its own prompts computed again

The drain starts with the last trajectory.
"""

from bench.routing.bounds import turns_s
from bench.routing.fleet import Run, WorkerFleet, WorkerResult
from bench.routing.policies import Spell
from bench.routing.workload import Script


def losses(run: Run, scripts: list[Script], fleet: WorkerFleet, *, bound_s: float) -> dict[str, float]:
    """Return each loss in units of the bound."""
    whole_s = bound_s * len(run.workers)
    least = {script: turns_s(script, fleet) for script in set(scripts)}
    kinds = list(fleet.workers)

    def needed_s(worker: WorkerResult) -> float:
        kind = kinds.index(worker.gpu)
        return sum(least[scripts[number]][turn][kind] for number, turn in worker.turns)

    spells = {"": ([one.before for one in run.workers], run.last_started_s)}
    spells[" in the drain"] = [one.drain for one in run.workers], run.makespan_s - run.last_started_s
    found, done_s = {}, 0.0
    for when, (spent, seconds) in spells.items():
        shared_s = sum(_shared_s(spell, fleet, worker.gpu) for spell, worker in zip(spent, run.workers, strict=True))
        found["idle" + when] = len(spent) * seconds - sum(spell.busy_s for spell in spent)
        found["batches not full" + when] = sum(spell.standing_s for spell in spent) - shared_s
        done_s += shared_s + sum(spell.prompts_s + spell.replies_s for spell in spent)
    at_least_s = sum(needed_s(worker) for worker in run.workers)
    found["prompts computed again"] = done_s - at_least_s
    found["turns on hardware slower at them"] = at_least_s - whole_s
    return {name: seconds / whole_s for name, seconds in found.items()}


def _shared_s(spell: Spell, fleet: WorkerFleet, gpu: str) -> float:
    """Return the standing cost of the steps, had all of them been full."""
    return spell.num_generated * fleet.pace(gpu).base_step_s(fleet.max_batch) / fleet.max_batch
