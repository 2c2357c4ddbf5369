"""Choose the number of prefill and decode workers where the recipe leaves it open. Pure.

    find_worker_numbers, WorkerNumbers   both numbers as far as they could be used, and the recipe with fewer of each
    with_single_workers                  the recipe with one worker of each
    compute_average_turn, AverageTurn    the average turn of the recipe's domains
    warn_busy_loops                      whether the env workers bear the calls

Both numbers follow from one signal, the tokens that can be decoded in a second, as HeteroScale sizes its pools: enough
decode workers to generate what training consumes, but no more than hold all running episodes; and enough prefill
workers to compute the prompts of their turns.
"""

from dataclasses import dataclass
from math import ceil

import msgspec

from hpcrl.config.engine_speed import estimate_engine_speed
from hpcrl.config.recipe import Recipe, RoleName
from hpcrl.errors import PlanError
from hpcrl.hardware.cost_model import (
    TrainingWork,
    WorkerSpeed,
    estimate_step_s,
    make_model_shape,
)
from hpcrl.hardware.gpus import GpuModel
from hpcrl.hardware.loop_model import estimate_call_rate


@dataclass(frozen=True, kw_only=True)
class AverageTurn:
    """The average turn over the domains, by their weights."""

    num_new: float
    """Tokens that the prompt adds to the conversation before it."""
    num_reply: float
    num_context: float
    """Tokens of the conversation, on average over its turns."""


@dataclass(frozen=True, kw_only=True)
class _WorkerDemand:
    """The number of workers that a role could use, and why."""

    role: RoleName
    num: int
    why: str

    def describe(self, num: int) -> str:
        less = "" if num == self.num else f" of the {self.num} that it could use, because more do not fit"
        workers = "worker" if num == 1 else "workers"
        return f"{self.role} has {num} {workers}{less}: {self.why}"


@dataclass(frozen=True, kw_only=True)
class WorkerNumbers:
    """The numbers of workers that a recipe could use where it leaves them open."""

    recipe: Recipe
    demands: list[_WorkerDemand]

    @property
    def largest(self) -> int:
        """The larger of the two numbers."""
        return max((demand.num for demand in self.demands), default=1)

    def limit(self, most: int) -> tuple[Recipe, list[str]]:
        """Fill both numbers in, scaled down in the same ratio until the larger one is `most`, and give the reasons."""
        nums = {demand.role: ceil(demand.num * most / self.largest) for demand in self.demands}
        resources, replace = self.recipe.resources, msgspec.structs.replace
        if resources.prefill.num_workers == "auto":
            resources = replace(resources, prefill=replace(resources.prefill, num_workers=nums.get("prefill", 1)))
        if resources.decode.num_workers == "auto":
            resources = replace(resources, decode=replace(resources.decode, num_workers=nums.get("decode", 1)))
        reasons = [demand.describe(nums[demand.role]) for demand in self.demands]
        return replace(self.recipe, resources=resources), reasons


def with_single_workers(recipe: Recipe) -> Recipe:
    """Set open numbers to one worker: where sizing starts, and what is kept where facts are missing."""
    return WorkerNumbers(recipe=recipe, demands=[]).limit(1)[0]


def find_worker_numbers(recipe: Recipe, *, gpus: dict[RoleName, GpuModel | None]) -> WorkerNumbers:
    """Compute the numbers that the recipe leaves open; `gpus` is the GPU type that each role gets."""
    return WorkerNumbers(recipe=recipe, demands=_find_worker_demands(recipe, gpus))


def compute_average_turn(recipe: Recipe) -> AverageTurn:
    """Average over the domains; each domain's turn counts by its weight times its number of turns."""
    weights, news, replies, contexts = 0.0, 0.0, 0.0, 0.0
    longest = recipe.max_context or float("inf")
    for domain in recipe.domains.values():
        weight = domain.weight * domain.max_turns
        reply = domain.usual_reply_tokens or domain.max_new_tokens or recipe.rollout.max_new_tokens
        mean = (domain.usual_prompt_tokens + reply) * (domain.max_turns + 1) / 2
        weights += weight
        news += weight * domain.usual_prompt_tokens
        replies += weight * reply
        contexts += weight * min(mean, longest)
    return AverageTurn(num_new=news / weights, num_reply=replies / weights, num_context=contexts / weights)


def _find_worker_demands(recipe: Recipe, gpus: dict[RoleName, GpuModel | None]) -> list[_WorkerDemand]:
    """Return the demands of the roles whose number is open; empty if the model's size or the hardware is unknown."""
    num_prefill, num_asked = recipe.resources.prefill.num_workers, recipe.resources.decode.num_workers
    prefill, decode = _estimate_role_speed(recipe, "prefill", gpus), _estimate_role_speed(recipe, "decode", gpus)
    gpu, is_open = gpus.get("decode"), "auto" in (num_prefill, num_asked)
    if decode is None or gpu is None or not is_open or (recipe.has_prefill and prefill is None):
        return []
    turn, running = compute_average_turn(recipe), recipe.rollout.max_running
    most = min(recipe.engine.max_batch, _count_held_episodes(decode, turn, gpu.name))
    if num_asked == "auto":
        num_decode, why = _choose_decode_number(recipe, decode, turn, most=most, gpus=gpus)
    else:
        num_decode, why = num_asked, ""
    tokens_per_s = _estimate_token_rate(decode, turn, most=most, num_decode=num_decode, running=running)
    open_ones = []
    if num_asked == "auto":
        open_ones.append(_WorkerDemand(role="decode", num=num_decode, why=why))
    if num_prefill == "auto" and prefill is not None:
        busy = tokens_per_s / turn.num_reply * prefill.prefill_s(turn.num_new, num_known=turn.num_context)
        why = (
            f"{num_decode} decode workers generate {tokens_per_s:.0f} tokens/s, and the prompts of those turns "
            f"({turn.num_new:.0f} new tokens each) keep {busy:.2f} of them busy"
        )
        open_ones.append(_WorkerDemand(role="prefill", num=ceil(busy), why=why))
    return open_ones


def _choose_decode_number(
    recipe: Recipe, decode: WorkerSpeed, turn: AverageTurn, *, most: int, gpus: dict[RoleName, GpuModel | None]
) -> tuple[int, str]:
    """Return the decode workers that generate what training consumes, at most those that hold all episodes; and why.

    In mode "sync" training waits for the engines, which then gain from every worker.
    """
    rollout, running = recipe.rollout, recipe.rollout.max_running
    num_held = ceil(running / most)
    holds = f"each holds {most} of the {running} episodes, of {turn.num_context:.0f} tokens on average"
    consumed = _estimate_consumption(recipe, turn, gpus.get("train"))
    if consumed is None or rollout.mode == "sync":
        return num_held, holds
    num_allowed = (rollout.max_lag + 1) * recipe.train.groups_per_step * rollout.episodes_per_group
    at_once = min(running, num_allowed)

    def generate_rate(num: int) -> float:
        rate = _estimate_token_rate(decode, turn, most=most, num_decode=num, running=at_once)
        prompt_s = 0.0 if recipe.has_prefill else decode.prefill_s(turn.num_new, num_known=turn.num_context) / num
        return turn.num_reply / (turn.num_reply / rate + prompt_s)

    num = next((num for num in range(1, num_held) if generate_rate(num) >= consumed), num_held)
    if num == num_held:
        return num_held, holds
    return num, (
        f"{num} together generate {generate_rate(num):.0f} tokens/s, and training consumes about {consumed:.0f} "
        f"(to hold all {running} episodes at once: {num_held} workers)"
    )


def _estimate_consumption(recipe: Recipe, turn: AverageTurn, gpu: GpuModel | None) -> float | None:
    """Estimate the generated tokens that the trainer's GPUs consume in a second, with those of extra episodes."""
    architecture, train = recipe.model.architecture, recipe.resources.train
    if gpu is None or gpu.bf16_tflops is None or architecture is None:
        return None
    num_gpus = train.num_workers * train.gpus_per_worker
    if not num_gpus:
        return None
    one = TrainingWork(num_tokens=1.0, mean_length=0.0, num_gpus=num_gpus)  # the most: without attention
    tokens_per_s = 1 / estimate_step_s(gpu, shape=make_model_shape(architecture), work=one)
    share = turn.num_reply / (turn.num_new + turn.num_reply)
    return tokens_per_s * share * recipe.rollout.episodes_per_group / recipe.rollout.group_size


def _estimate_token_rate(decode: WorkerSpeed, turn: AverageTurn, *, most: int, num_decode: int, running: int) -> float:
    """Return the tokens/s of all decode workers, each of which holds `most` episodes."""
    batch = min(most, running / num_decode)
    return num_decode * batch / decode.decode_s(batch, num_kv=batch * turn.num_context)


def warn_busy_loops(recipe: Recipe, *, gpus: dict[RoleName, GpuModel | None]) -> list[str]:
    """Warn if the calls of the model at the engines' pace are more than the env workers' event loops bear.

    Nothing is known of engines on hardware of unknown speed, or of a model of unknown size.
    """
    decode = _estimate_role_speed(recipe, "decode", gpus)
    if decode is None:
        return []
    turn, num_env = compute_average_turn(recipe), recipe.resources.env.num_workers
    most = max(1, min(recipe.engine.max_batch, int(decode.kv_tokens / turn.num_context)))
    num_decode = recipe.role_resources("decode").num_workers
    tokens_per_s = _estimate_token_rate(
        decode, turn, most=most, num_decode=num_decode, running=recipe.rollout.max_running
    )
    num_calls, borne = tokens_per_s / turn.num_reply, estimate_call_rate(num_context=turn.num_context)
    if num_calls <= num_env * borne:
        return []
    return [
        f"engines answer about {num_calls:.0f} calls of the model in a second, {turn.num_reply:.0f} tokens each, and "
        f"the event loop of an env worker bears about {borne:.0f} with {turn.num_context:.0f} tokens of conversation: "
        f"set resources.env.num_workers = {ceil(num_calls / borne)} (now {num_env}), or correct usual_prompt_tokens, "
        "usual_reply_tokens and max_turns of the domains"
    ]


def _count_held_episodes(decode: WorkerSpeed, turn: AverageTurn, gpu: str) -> int:
    """Return the number of episodes whose KV fits into one decode worker; PlanError if not even one does."""
    held = int(decode.kv_tokens / turn.num_context)
    if not held:
        raise PlanError(
            f"an episode has {turn.num_context:.0f} tokens on average, and a decode worker ({gpu}) has room for the KV "
            f"of {decode.kv_tokens}: raise resources.decode.gpus_per_worker, set engine.max_model_len, or correct "
            "usual_prompt_tokens, usual_reply_tokens and max_turns of the domains"
        )
    return held


def _estimate_role_speed(recipe: Recipe, role: RoleName, gpus: dict[RoleName, GpuModel | None]) -> WorkerSpeed | None:
    """Estimate the speed of a role's worker; None if size or hardware is unknown, or the model does not fit.

    A model that does not fit is refused later.
    """
    gpu, architecture = gpus.get(role), recipe.model.architecture
    if gpu is None or not gpu.has_speed or architecture is None:
        return None
    num_gpus, shape = recipe.role_resources(role).gpus_per_worker, make_model_shape(architecture)
    found = estimate_engine_speed(recipe.engine, gpu=gpu, shape=shape, num_gpus=num_gpus)
    return found if found.kv_tokens else None
