"""RollArt's figures beside those of the simulator, a function for each of its tables."""

from dataclasses import replace
from statistics import fmean

from bench.figures import Figure
from bench.papers.lockstep import play_in_lockstep
from bench.papers.workload import (
    BY_HARDWARE,
    LIKE_ROLLART,
    ONLY_H20,
    ONLY_H800,
    REWARD_S,
    SYNC,
    TASKS,
    PublishedEpisodes,
    load_recipe,
    measure_rollout_s,
    measure_step_s,
    simulate_steps,
    use_one_pool,
)
from hpcrl.hardware.cost_model import LINK_BYTES_PER_S, read_model_shape
from hpcrl.hardware.model_catalogue import MODEL_CONFIGS
from hpcrl.simulation.sizes import find_sizes
from hpcrl.simulation.workload import TurnScript

BAR_HEADLINE = 0.15
HEADLINE = {"Sync+": 2.05, "one step off": 1.35, "AReaL's admission": 1.31}
HEALTHY_STEP_S = 366.0
HEALTHY_TRAINING_S = 0.23 * HEALTHY_STEP_S
HEALTHY_GENERATION_S = 0.54 * HEALTHY_STEP_S
NUM_EPISODES = 256
ENV_S = 10.0
LOCKSTEP = {1: 1.23, 3: 1.51, 5: 1.69, 7: 2.18, 10: 2.27}
"""Published ratios by the sigma of the time of an environment."""
WEIGHTS = {"Qwen/Qwen3-8B": (1.4, 38.6), "Qwen/Qwen3-14B": (5.1, 84.1), "Qwen/Qwen3-32B": (9.6, 157.0)}
"""Published exposed times of new weights, and those of a naive exchange."""


def measure_inputs(num_steps: int) -> list[Figure]:
    """Compare a healthy step of SWE tasks, of which only resets and the rest are inputs."""
    source = PublishedEpisodes(tasks={"swe": TASKS["swe"]}, failing_share=0.0)
    result = simulate_steps(*SYNC, *ONLY_H800, num_steps=num_steps, source=source)
    assert result.step_s is not None
    given_s = HEALTHY_STEP_S - HEALTHY_TRAINING_S - HEALTHY_GENERATION_S
    generation_s = result.step_s - result.train_s - given_s
    replies = [turn.num_reply for turn in _draw_replies("gemmath", NUM_EPISODES)]
    return [
        Figure(name="RollArt: healthy step of SWE (published 366)", value=result.step_s, unit="s"),
        Figure(name="the same: training (published 0.23)", value=result.train_s / result.step_s, unit="share"),
        Figure(name="the same: generation (published 0.54)", value=generation_s / result.step_s, unit="share"),
        Figure(
            name="longest reply of a step of GEM-math / mean (published 5 to 9)", value=max(replies) / fmean(replies)
        ),
    ]


def _draw_replies(name: str, num: int) -> list[TurnScript]:
    source = PublishedEpisodes(tasks=TASKS)
    return [source.draw(name, seed=str(number)).turns[0] for number in range(num)]


def measure_headline(num_steps: int) -> list[Figure]:
    own = measure_step_s(*BY_HARDWARE, num_steps=num_steps)
    others = {
        "Sync+": measure_step_s(*ONLY_H800, *SYNC, num_steps=num_steps),
        "one step off": measure_step_s(*ONLY_H800, "rollout.mode=one-step-off", num_steps=num_steps),
        "AReaL's admission": measure_step_s(*ONLY_H800, num_steps=num_steps),
    }
    figures = [Figure(name="RollArt: time of a step", value=own, unit="s")]
    for name, published in HEADLINE.items():
        ratio = others[name] / own
        figures += [
            Figure(name=f"RollArt: {name} / hpcrl (published {published})", value=ratio),
            Figure(
                name=f"RollArt: {name}: off the published ratio by",
                value=abs(ratio / published - 1),
                unit="share",
                bar=BAR_HEADLINE,
                better="lower",
            ),
        ]
    return figures


def measure_alpha(num_steps: int) -> list[Figure]:
    """Compare limits of staleness; RollArt gains at most 1.22 from alpha 1 to 6."""
    one, two, six = (
        measure_step_s(*BY_HARDWARE, f"rollout.max_lag={alpha}", num_steps=num_steps) for alpha in (1, 2, 6)
    )
    cut = measure_step_s(*BY_HARDWARE, num_steps=num_steps, waits_for_old=False)
    return [
        Figure(name="RollArt: alpha 1 / alpha 2 (published: at most 1.22)", value=one / two),
        Figure(name="RollArt: alpha 1 / alpha 6 (published: at most 1.22)", value=one / six),
        Figure(name="RollArt: alpha 1 / alpha 6, old episodes cut", value=cut / six),
    ]


def measure_redundancy(num_steps: int) -> list[Figure]:
    """Compare redundancy of groups in synchronous steps; RollArt gains 1.00 to 1.62."""
    sync = (*BY_HARDWARE, "rollout.mode=sync", "rollout.max_running=512")
    base = measure_step_s(*sync, num_steps=num_steps)
    larger = measure_step_s(*sync, "rollout.redundancy=4", "rollout.late_after_s=0", num_steps=num_steps)
    more = measure_step_s(*sync, "rollout.spare_groups=4", num_steps=num_steps)
    return [
        Figure(name="RollArt: 32 x 8 / 32 x 12 (published 1.00 to 1.62)", value=base / larger),
        Figure(name="RollArt: 32 x 8 / 36 x 8 (published 1.00 to 1.62)", value=base / more),
    ]


def measure_affinity(num_steps: int) -> list[Figure]:
    """Compare rollouts of one kind of task on one kind of GPU, then both kinds of GPU with one; all cost the same."""
    pools = use_one_pool("compute", num_gpus=2), use_one_pool("bandwidth", num_gpus=6)
    rollouts_s = {
        kind: [measure_rollout_s(*pool, num_steps=num_steps, source=_episodes_of(kind)) for pool in pools]
        for kind in ("frozenlake", "gemmath")
    }
    lake, math = rollouts_s["frozenlake"], rollouts_s["gemmath"]
    figures = [
        Figure(name="RollArt: FrozenLake, 2 H800 / 6 H20 (published 0.53)", value=lake[0] / lake[1]),
        Figure(name="RollArt: GEM-math, 6 H20 / 2 H800 (published 0.49 to 0.79)", value=math[1] / math[0]),
    ]
    h20_s, h800_s = (measure_step_s(*pool, num_steps=num_steps) for pool in (ONLY_H20, ONLY_H800))
    mappings = {"by kind of work": BY_HARDWARE, "RollArt's example": LIKE_ROLLART, "hpcrl's cost model": ()}
    for name, settings in mappings.items():
        own_s = measure_step_s(*settings, num_steps=num_steps)
        figures += [
            Figure(name=f"RollArt: H20 only / both, {name} (published 1.30 to 1.68)", value=h20_s / own_s),
            Figure(name=f"RollArt: H800 only / both, {name} (published 1.12 to 1.37)", value=h800_s / own_s),
        ]
    return figures


def _episodes_of(kind: str) -> PublishedEpisodes:
    return PublishedEpisodes(tasks={kind: TASKS[kind]}, failing_share=0.0)


def measure_trajectory(num_steps: int) -> list[Figure]:
    """Compare rollouts of SWE tasks: a turn of all episodes after the other, and each episode on its own."""
    request = load_recipe(["swe"], ONLY_H800)
    sizes = find_sizes(request)
    speed = sizes.find_speed(sizes.decode, request.recipe)
    tasks = {"swe": replace(TASKS["swe"], reset_s=0.0)}
    figures = []
    for sigma, published in LOCKSTEP.items():
        source = PublishedEpisodes(tasks=tasks, failing_share=0.0, latency=(ENV_S, float(sigma)))
        lockstep_s = fmean(
            play_in_lockstep(
                [source.draw("swe", seed=f"{step} {number}") for number in range(NUM_EPISODES)],
                speed=speed,
                num_engines=sizes.decode.num_workers,
                max_batch=request.recipe.engine.max_batch,
            )
            for step in range(num_steps)
        )
        own_s = measure_rollout_s(*ONLY_H800, num_steps=num_steps, source=source)
        name = f"RollArt: environments of N(10 s, {sigma} s), lockstep / trajectories (published {published})"
        figures.append(Figure(name=name, value=lockstep_s / own_s))
    return figures


def measure_rewards(num_steps: int) -> list[Figure]:
    """Compare rollouts of GEM-math while half of 16 H800 are kept for rewards, and while all of them generate."""
    source, num_kept = _episodes_of("gemmath"), 8
    half_s, all_s = (
        measure_rollout_s(*use_one_pool("compute", num_gpus=num), num_steps=num_steps, source=source)
        for num in (16 - num_kept, 16)
    )
    use = NUM_EPISODES * REWARD_S / (num_kept * (half_s + REWARD_S))
    return [
        Figure(name="RollArt: rollout, rewards on half the GPUs / elsewhere (published 2.05)", value=half_s / all_s),
        Figure(
            name="RollArt: use of the GPUs kept for rewards, in a rollout (published 0.06)", value=use, unit="share"
        ),
    ]


def measure_weights(num_steps: int) -> list[Figure]:
    """Compute how long an engine of one GPU pauses for new weights; then compare steps with published pauses."""
    figures = []
    for name, (published, naive) in WEIGHTS.items():
        shape = read_model_shape(MODEL_CONFIGS[name])
        load_s = shape.num_params * shape.weight_bytes / LINK_BYTES_PER_S
        model = name.partition("/")[2]
        figures += [
            Figure(name=f"RollArt: pause for weights of {model} (published {published})", value=load_s, unit="s"),
            Figure(name=f"the same if engines wait for their way too (published {naive})", value=2 * load_s, unit="s"),
        ]
    hidden_s, naive_s, own_s = (
        measure_step_s(*BY_HARDWARE, num_steps=num_steps, stall_s=stall_s)
        for stall_s in (*WEIGHTS["Qwen/Qwen3-8B"], None)
    )
    return [
        *figures,
        Figure(name="time of a step, pause of 38.6 s / 1.4 s (no published figure)", value=naive_s / hidden_s),
        Figure(name="time of a step, the pause above / 1.4 s (no published figure)", value=own_s / hidden_s),
    ]
