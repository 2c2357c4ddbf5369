"""Measure whether training sees the episodes that were played, long ones as well: `python -m bench.bias`.

    redundancy    groups of 4 of 6 episodes, kept by index, after a time, or the first to finish; spare groups
    staleness     asynchronous episodes up to `max_lag` versions old, while training takes no time
    chain         eight jobs, seven of them killed with SIGKILL at random times, against one long job; a job is about
                  12 times as long as a group, of which four run at once

The length and the reward of an episode are drawn when it starts (lognormal in length; long ones succeed less often), so
that those of all that were started are known, also of the ones that were cut off. Each row compares the episodes that
were trained on with all that were started, and with those of them that were not trained on ("dropped"), of the same
first tasks: every run continues until these are trained on. What a killed job drops is longer than the rest, as long
episodes are in flight more often; what is trained in its place is a new draw, which is compared with that of one job.
Engines are simulated, time is virtual, and the env worker, its journal, its spool on disk and the choice of groups are
those of a campaign. The p-values are of two-sample Kolmogorov-Smirnov tests of lengths.
"""

import math
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import mean

from bench.figures import Figure, main
from bench.rolling.campaign import RollingSetting
from bench.rolling.chain import ChainOutcome, run_chains
from bench.rolling.world import Play, Turn

MEDIAN_TOKENS = 600
TASK_SIGMA, EPISODE_SIGMA = 0.4, 0.8
NUM_TURNS = 2
MAX_TOKENS = 16_000
GROUP_SIZE, GROUPS_PER_STEP = 4, 16
NUM_JOBS = 8
BAR_BIAS = 0.05
"""How far a mean of what is trained may be from that of what was started, as a share."""
BAR_P = 0.05


def play_lognormal(seed: int, luck: random.Random, *, median: int = MEDIAN_TOKENS) -> Play:
    """Return a play whose length depends on its task and on chance, and that succeeds less often if it is long."""
    scale = median * math.exp(random.Random(seed).gauss(0, TASK_SIGMA) + luck.gauss(0, EPISODE_SIGMA))
    each = int(min(max(scale, NUM_TURNS), MAX_TOKENS)) // NUM_TURNS
    turns = [Turn(num_shown=64, num_generated=each, step_s=0.2) for _ in range(NUM_TURNS)]
    is_solved = luck.random() < math.exp(-each * NUM_TURNS / (3 * median))
    return Play(turns=turns, reward=float(is_solved))


def measure(full: bool) -> list[Figure]:
    num_tasks = 768 if full else 192
    plain = RollingSetting(
        plays=play_lognormal,
        num_steps=10_000,
        groups_per_step=GROUPS_PER_STEP,
        group_size=GROUP_SIZE,
        max_running=2 * GROUPS_PER_STEP * GROUP_SIZE,
        max_lag=16,
        train_s=2.0,
        num_gpus=2,
    )
    extra = replace(plain, redundancy=2, max_running=2 * GROUPS_PER_STEP * (GROUP_SIZE + 2))
    stale = replace(plain, train_s=0.0)
    rows = {
        "redundancy 2, by index": extra,
        "redundancy 2, late after 30 s": replace(extra, late_after_s=30.0),
        "redundancy 2, the first to finish": replace(extra, late_after_s=0.0),
        "sync, 4 spare groups of 16": replace(plain, mode="sync", spare_groups=4),
        "max_lag 1": replace(stale, max_lag=1),
        "max_lag 2": replace(stale, max_lag=2),
        "max_lag 4": replace(stale, max_lag=4),
    }
    short = partial(play_lognormal, median=MEDIAN_TOKENS // 4)  # less time for the same number of episodes
    narrow = replace(plain, plays=short, train_s=0.5, groups_per_step=4, max_running=4 * GROUP_SIZE, num_gpus=1)
    long_job, *outcomes = run_chains(
        [(narrow, 2 * num_tasks, ()), *((setting, num_tasks, ()) for setting in rows.values())]
    )
    chance = random.Random(7)
    kills = [long_job.seconds / NUM_JOBS * chance.uniform(0.3, 1.7) for _ in range(NUM_JOBS - 1)]
    (chain,) = run_chains([(narrow, 2 * num_tasks, kills)])
    figures = [
        figure
        for name, outcome in zip(rows, outcomes, strict=True)
        for figure in (
            *_compare(name, outcome, has_bar=rows[name] is extra),
            *_compare_dropped(name, outcome, has_bar=rows[name] is extra),
        )
    ]
    return [*figures, *_compare_chain(chain, long_job, num_tasks=2 * num_tasks)]


def _compare(name: str, outcome: ChainOutcome, *, has_bar: bool) -> list[Figure]:
    """Compare what was trained with what was started."""
    started, trained = outcome.started, outcome.trained
    lengths = mean(one.length for one in trained) / mean(one.length for one in started)
    rewards = mean(one.reward for one in trained) / mean(one.reward for one in started)
    return [
        Figure(name=f"{name}: tasks abandoned", value=outcome.num_abandoned, unit=""),
        Figure(name=f"{name}: mean length, trained / started", value=lengths),
        Figure(name=f"{name}: mean reward, trained / started", value=rewards),
        Figure(
            name=f"{name}: length off by",
            value=abs(lengths - 1),
            unit="share",
            bar=BAR_BIAS if has_bar else None,
            better="lower",
        ),
    ]


def _compare_dropped(name: str, outcome: ChainOutcome, *, has_bar: bool) -> list[Figure]:
    """Compare what was trained with what was started and not trained: two samples without a common member."""
    trained, dropped = ([one.length for one in part] for part in (outcome.trained, outcome.dropped))
    return [
        Figure(name=f"{name}: episodes dropped", value=len(dropped), unit=""),
        Figure(name=f"{name}: mean length, trained / dropped", value=mean(trained) / mean(dropped)),
        Figure(
            name=f"{name}: lengths trained, against dropped, p",
            value=compare_samples(trained, dropped),
            unit="",
            bar=BAR_P if has_bar else None,
        ),
    ]


def _compare_chain(chain: ChainOutcome, long_job: ChainOutcome, *, num_tasks: int) -> list[Figure]:
    counts = chain.count_groups(GROUP_SIZE)
    wrong = sum(counts[number] != times for number, times in long_job.count_groups(GROUP_SIZE).items())
    duplicates = len(chain.trained_ids) - len(set(chain.trained_ids)) + sum(num - 1 for num in counts.values())
    name = f"chain of {NUM_JOBS} jobs"
    length = mean(one.length for one in chain.trained) / mean(one.length for one in long_job.trained)
    return [
        *_compare("one long job", long_job, has_bar=True),
        *_compare(name, chain, has_bar=True),
        *_compare_dropped(name, chain, has_bar=False),
        Figure(name=f"{name}: episodes started / trained", value=len(chain.started) / len(chain.trained)),
        Figure(name=f"{name}: jobs killed", value=chain.num_killed, unit="", bar=NUM_JOBS - 1),
        Figure(name=f"{name}: tasks trained", value=len(counts), unit="", bar=num_tasks),
        Figure(name=f"{name}: tasks trained otherwise than by one job", value=wrong, unit="", bar=0, better="lower"),
        Figure(name=f"{name}: duplicates", value=duplicates, unit="", bar=0, better="lower"),
        Figure(
            name=f"{name}: mean reward / that of one job",
            value=mean(one.reward for one in chain.trained) / mean(one.reward for one in long_job.trained),
        ),
        Figure(
            name=f"{name}: mean length, off that of one job by",
            value=abs(length - 1),
            unit="share",
            bar=BAR_BIAS,
            better="lower",
        ),
        Figure(
            name=f"{name}: lengths trained, against one job, p",
            value=compare_samples([one.length for one in chain.trained], [one.length for one in long_job.trained]),
            unit="",
            bar=BAR_P,
        ),
    ]


def compare_samples(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the p-value of the two-sample Kolmogorov-Smirnov test, by the asymptotic distribution."""
    first, second = sorted(one), sorted(other)
    distance, i, j = 0.0, 0, 0
    for value in sorted({*first, *second}):
        while i < len(first) and first[i] <= value:
            i += 1
        while j < len(second) and second[j] <= value:
            j += 1
        distance = max(distance, abs(i / len(first) - j / len(second)))
    root = math.sqrt(len(first) * len(second) / (len(first) + len(second)))
    scaled = (root + 0.12 + 0.11 / root) * distance
    if scaled < 0.2:
        return 1.0  # the series does not converge there, and its limit is 1
    total = sum((-1) ** (k - 1) * math.exp(-2 * k * k * scaled * scaled) for k in range(1, 101))
    return float(min(max(2 * total, 0.0), 1.0))


if __name__ == "__main__":
    sys.exit(main("bias", measure))
