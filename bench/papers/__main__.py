"""Set figures of RollArt and DistFlow beside what the simulator and the cost model give: `python -m bench.papers`.

    inputs       RollArt: a synchronous step of its SWE tasks, which checks the inputs of the sections below
    headline     RollArt: time of a step of Sync+ (its environments and rewards asynchronous), one step off, and AReaL's
                 admission, each on H800 only, over that of hpcrl's on H800 and H20 of the same cost
    affinity     RollArt: rollout of FrozenLake and of GEM-math on 2 H800 over that on 6 H20; time of a step on one kind
                 of GPU over that on both, by two mappings and by hpcrl's cost model
    trajectory   RollArt: rollout in lockstep over that of trajectories on their own, by the sigma of environments
    rewards      RollArt: rollout while half of the GPUs are kept for rewards, over that while none is
    weights      RollArt: the time that new weights stop an engine, and what that costs in a step
    alpha        RollArt: time of a step with alpha 1 over that with 2 and 6
    redundancy   RollArt: time of a synchronous step of 32 groups of 8 over that of more or larger groups
    scaling      DistFlow: efficiency of many controllers to 512 ranks, and of a single one to 1,024

Published are: the turns of the five kinds of tasks; 8B, 32k tokens of context and 32 GPUs; a step of 366 s, of which
15 % is the time of resets (55 s are an input) and 8 % neither that nor training nor generation (of which 0.5 s for each
step of the environment, 5 s for a reward and 1.4 s for new weights are inputs); a failing reset in ten steps, which
takes 147 s more (513 s); that 2 H800 cost what 6 H20 do; limits of a reply in ROLL's configurations (2,048 and 128).
Assumed are: Qwen3-8B's sizes, 16 H800 that train, 32 groups of 8 episodes a step, of five kinds equally often, 8 H800
and 24 H20 that generate, in place of which the others have 16 H800, tools' output and replies of 500 and 150 tokens a
turn for SWE, 800 and 60 for WebShop, 200 and 60 for FrozenLake, 100 and 1,750 for both GEM tasks (lognormal, sigma
0.8), 0.1 s for a step and 1 s for a reset of the other environments, H800 for the first three kinds and H20 for GEM, no
remote prefill, 4 env workers. Six pairs of lengths were tried for SWE, on `inputs` alone, until training and generation
were as published. All of this was fixed before any ratio by it was seen, and nothing was changed since; those of an
earlier model (1.67, 1.31, 0.99) were known.

Assumed for the four sections that came later, with the inputs above, and fixed before they ran: that a rollout is a
synchronous step without training, rewards and new weights; 48 H20 as the pool of H20 only (for `affinity`, steps of
earlier runs on it, on H800 only and on both were known: no mapping was faster by more than 3 %); SWE on 16 H800 without
resets for `trajectory`; GEM-math on 16 H800, of which 8 are kept for rewards, for `rewards`; engines of one GPU for
`weights`, to which all weights travel at 25 GB/s, and which copy them at 25 GB/s.

The published ratios of the headline are times to a score, those here are times of a step. AReaL's admission is hpcrl's
(the formula is the same). hpcrl has no lockstep mode: `trajectory` plays it on the simulator's engines, and
`python -m bench.rollout --only latency` with real env workers. The simulator has workers for rewards without end, so
that the use of elastic ones (published 88 %) is not here: `python -m bench.rollout --only reward` and
`python -m bench.rewards` run real ones. Pauses for weights are inputs of the simulator; `python -m bench.vllm_weights`
and `python -m bench.weights` measure them. DistFlow is not a simulation, but arithmetic with the inputs of
`compute_scaling`.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial

from bench.figures import Figure, main
from bench.papers.distflow import compute_scaling
from bench.papers.rollart import (
    measure_affinity,
    measure_alpha,
    measure_headline,
    measure_inputs,
    measure_redundancy,
    measure_rewards,
    measure_trajectory,
    measure_weights,
)

BY_STEPS: dict[str, Callable[[int], list[Figure]]] = {
    "inputs": measure_inputs,
    "headline": measure_headline,
    "affinity": measure_affinity,
    "trajectory": measure_trajectory,
    "rewards": measure_rewards,
    "weights": measure_weights,
    "alpha": measure_alpha,
    "redundancy": measure_redundancy,
}
"""The sections that simulate a number of steps."""


def measure(full: bool, arguments: argparse.Namespace) -> list[Figure]:
    only: str | None = arguments.only
    parts: dict[str, Callable[[], list[Figure]]] = {
        name: partial(simulate, 12 if full else 6) for name, simulate in BY_STEPS.items()
    }
    parts["scaling"] = compute_scaling
    return [figure for name in ([only] if only else parts) for figure in parts[name]()]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=(*BY_STEPS, "scaling"), help="one section")


if __name__ == "__main__":
    sys.exit(main("papers", measure, add_options=add_options))
