"""Advisories: each fires on a campaign made bad in its way, never on a healthy one."""

import math
import random
from collections.abc import Callable, Iterator

import msgspec
import pytest

from hpcrl.campaign_dir.events import (
    CampaignEvent,
    CheckpointSaved,
    EngineCounted,
    EpisodesCounted,
    FaultReported,
    FlatGroupsDropped,
    JobStarted,
    MemoryRanOut,
    SegmentScored,
    StaleDropped,
    StepFinished,
    TrainingResumed,
    WorkerEnded,
    WorkerFailed,
    WorkerStarted,
)
from hpcrl.monitor.advisories import (
    SKIPPED_FOR_GRADIENT,
    Advisory,
    HealthFacts,
    describe_advisory,
    find_advisories,
)
from hpcrl.monitor.progress import CampaignProgress
from hpcrl.spool.ids import make_held_out_domain
from tests.support.synthetic import T0

STEP_S = 60.0
NUM_STEPS = 60

StepChange = Callable[[int], dict[str, object]]


def make_learning_step(number: int, **changes: object) -> StepFinished:
    """Return a step of a campaign that learns: the reward rises with some noise, the rest is as it should be."""
    noise = random.Random(number).uniform(-0.03, 0.03)
    values: dict[str, object] = {
        "step": number,
        "version": number,
        "num_groups": 8,
        "num_flat_groups": 1,
        "reward_mean": 0.1 + 0.8 * number / NUM_STEPS + noise,
        "reward_std": 0.4,
        "lag_mean": 1.0,
        "lag_max": 2,
        "grad_norm": 0.7 + noise,
        "kl": 0.004,
        "entropy": 2.0 - number / NUM_STEPS,
        "step_s": 0.8 * STEP_S,
        "wait_s": 0.2 * STEP_S,
        "time": T0 + number * STEP_S,
        "role": "train",
        "worker": "000-train-0",
    }
    return StepFinished(**{**values, **changes})  # type: ignore[arg-type]


def stamp_event(worker: str, event: CampaignEvent, *, time: float) -> CampaignEvent:
    name = f"000-{worker}"
    return msgspec.structs.replace(event, worker=name, role=worker.rpartition("-")[0], node="n1", time=time)


def list_healthy_events(change: StepChange = lambda number: {}) -> Iterator[CampaignEvent]:
    yield JobStarted(time=T0, node="n0")
    for worker in ("train-0", "decode-0", "env-0"):
        yield stamp_event(worker, WorkerStarted(pid=1), time=T0)
    for number in range(1, NUM_STEPS + 1):
        time = T0 + number * STEP_S
        outcomes = {"lake": {"finished": 60 * number, "max-turns": 4 * number, "env-fault": number // 2}}
        yield stamp_event(
            "env-0", EpisodesCounted(done=60 * number, truncated=4 * number, outcomes=outcomes), time=time
        )
        yield stamp_event("reward-0", SegmentScored(num=64, rewards={"lake": [0.5] * 64}), time=time)
        yield stamp_event("decode-0", EngineCounted(window_s=10.0, busy_share=0.9), time=time)
        yield make_learning_step(number, **change(number))
        if number % 10 == 0:
            yield stamp_event("train-0", CheckpointSaved(step=number), time=time)


def judge(
    *events: CampaignEvent,
    now: float = T0 + (NUM_STEPS + 1) * STEP_S,
    is_running: bool = True,
    checkpoint_every: int | None = None,
    num_steps: int | None = None,
) -> list[Advisory]:
    progress = CampaignProgress()
    for event in events:
        progress.add(event)
    facts = HealthFacts(
        campaign="one",
        progress=progress,
        now=now,
        is_running=is_running,
        checkpoint_every=checkpoint_every,
        num_steps=num_steps,
    )
    return find_advisories(facts)


def judge_steps(change: StepChange) -> list[str]:
    return [advisory.name for advisory in judge(*list_healthy_events(change))]


def names(advisories: list[Advisory]) -> list[str]:
    return [advisory.name for advisory in advisories]


def test_a_healthy_campaign_has_no_advisory() -> None:
    assert judge(*list_healthy_events()) == []


def test_a_command_that_is_advised_names_the_campaign() -> None:
    scored = [
        stamp_event("reward-0", SegmentScored(reward_faults={"lake": {"finished": 64}}), time=T0 + number)
        for number in range(1, 5)
    ]
    remedies = [advisory.remedy for advisory in judge(*list_healthy_events(), *scored)]
    assert any("`hpcrl traj ls one --domain lake`" in remedy for remedy in remedies)


@pytest.mark.parametrize("num", range(12))
def test_a_campaign_that_has_just_started_has_no_advisory(num: int) -> None:
    assert judge(*list(list_healthy_events())[:num], now=T0 + 60) == []


def test_a_campaign_without_events_has_no_advisory() -> None:
    assert judge(now=T0) == []


BAD_STEPS: dict[str, StepChange] = {
    "reward-stalled": lambda number: {"reward_mean": 0.2 + random.Random(number).uniform(-0.03, 0.03)},
    "reward-falls": lambda number: {"reward_mean": 0.8 if number < 40 else 0.1} if number > 10 else {},
    "flat-groups": lambda number: {"num_flat_groups": 6, "reward_mean": 0.1 + 0.001 * number if number < 50 else 0.1},
    "gradient-explodes": lambda number: {"grad_norm": 90.0} if number > 55 else {},
    "steps-skipped": lambda number: {"skipped": "not finite"} if number % 4 == 0 else {},
    "entropy-collapse": lambda number: {"entropy": 2.0 * 0.9**number, "reward_mean": 0.2 + 0.01 * (number % 3)},
    "trainer-waits": lambda number: {"wait_s": 0.9 * STEP_S, "step_s": 0.1 * STEP_S},
}


@pytest.mark.parametrize("name", BAD_STEPS)
def test_an_advisory_fires_on_steps_that_are_made_bad(name: str) -> None:
    assert name in judge_steps(BAD_STEPS[name])


def find_stalled(*, rise: float, num_steps: int, num_episodes: int = 64, num_planned: int | None = None) -> list[int]:
    """Return those of 100 campaigns that count as stalled; their rewards have a spread of 0.4 over episodes."""
    found, noise = [], 0.4 / math.sqrt(num_episodes)
    for seed in range(100):
        source = random.Random(seed)
        rewards = [0.3 + rise * number / num_steps + source.gauss(0.0, noise) for number in range(num_steps)]
        steps = (make_learning_step(number, reward_mean=reward) for number, reward in enumerate(rewards))
        found += [seed] if "reward-stalled" in names(judge(*steps, num_steps=num_planned)) else []
    return found


def test_a_slow_rise_does_not_stall_while_it_may_hide_in_the_noise() -> None:
    for num_steps in range(30, 300, 30):
        assert find_stalled(rise=0.001 * num_steps, num_steps=num_steps) == []


def test_a_slow_rise_does_not_stall_in_large_batches_that_have_little_noise() -> None:
    for num_steps in (30, 60):
        slow = find_stalled(rise=0.0005 * num_steps, num_steps=num_steps, num_episodes=1024, num_planned=400)
        assert len(slow) <= 5
    assert len(find_stalled(rise=0.0, num_steps=150, num_episodes=1024, num_planned=400)) > 95


@pytest.mark.parametrize("likeness", [0.0, 0.7])
def test_a_rise_whose_level_wanders_does_not_fall(likeness: float) -> None:
    for seed in range(10):
        source, level, steps = random.Random(seed), 0.0, []
        for number in range(1, 401):
            level = likeness * level + source.gauss(0.0, 0.02 * math.sqrt(1 - likeness**2))
            steps.append(make_learning_step(number, reward_mean=0.3 + 0.25 * number / 400 + level))
            if number % 80 == 0:
                assert "reward-falls" not in names(judge(*steps, num_steps=400))


@pytest.mark.parametrize("num_falling", [40, 200])
def test_a_reward_that_loses_most_of_its_rise_falls(num_falling: int) -> None:
    for seed in range(10):
        source = random.Random(seed)
        rewards = [
            0.3 + 0.3 * min(number / 200, 1) - 0.25 * min(max(number - 200, 0) / num_falling, 1) + source.gauss(0, 0.05)
            for number in range(400)
        ]
        steps = (make_learning_step(number, reward_mean=reward) for number, reward in enumerate(rewards))
        assert "reward-falls" in names(judge(*steps, num_steps=400))


def test_a_reward_without_a_rise_stalls_once_the_noise_hides_no_rise() -> None:
    assert len(find_stalled(rise=0.0, num_steps=30)) < 3
    assert len(find_stalled(rise=0.0, num_steps=300)) > 95


def test_a_reward_that_rose_early_and_stays_there_does_not_stall() -> None:
    source = random.Random(0)
    rewards = [min(0.1 + number / 60, 0.6) + source.gauss(0.0, 0.05) for number in range(1000)]
    steps = (make_learning_step(number, reward_mean=reward) for number, reward in enumerate(rewards))
    assert names(judge(*steps)) == []


def test_a_domain_that_fails_after_many_good_episodes_is_named_until_it_works_again() -> None:
    good, failed = 500_000, 0
    events = [stamp_event("env-0", EpisodesCounted(done=good, outcomes={"lake": {"finished": good}}), time=T0)]
    for _ in range(1000):
        good, failed = good + 3, failed + 7
        outcomes = {"lake": {"finished": good, "env-fault": failed}}
        events.append(stamp_event("env-0", EpisodesCounted(done=good, env_fault=failed, outcomes=outcomes), time=T0))
    assert names(judge(*events)) == ["domain-failing"]
    outcomes = {"lake": {"finished": good + 5000, "env-fault": failed}}
    works = EpisodesCounted(done=good + 5000, env_fault=failed, outcomes=outcomes)
    assert "domain-failing" not in names(judge(*events, stamp_event("env-0", works, time=T0)))


def test_a_job_of_a_chain_that_makes_no_first_step_is_named() -> None:
    events, started_at = list(list_healthy_events()), T0 + (NUM_STEPS + 1) * STEP_S
    events.append(JobStarted(job=1, time=started_at, node="n0"))
    assert names(judge(*events, now=started_at + 1200)) == []
    assert "step-overdue" in names(judge(*events, now=started_at + 7200))


def test_a_reward_that_never_changes_stalls() -> None:
    assert "reward-stalled" in judge_steps(lambda number: {"reward_mean": 0.0, "reward_std": 0.0})


def list_events_with_one_reward(reward: float, *, entropy: float = 2.0) -> Iterator[CampaignEvent]:
    """Return a campaign whose episodes all have the same reward, from the first one on."""
    change = {"reward_mean": reward, "reward_std": 0.0, "num_flat_groups": 8}
    for event in list_healthy_events(lambda number: change | {"entropy": entropy if number < 30 else 0.01 * entropy}):
        yield (
            msgspec.structs.replace(event, rewards={"lake": [reward] * 64})
            if isinstance(event, SegmentScored)
            else event
        )


def test_tasks_that_are_solved_from_the_start_are_a_notice_alone() -> None:
    found = judge(*list_events_with_one_reward(1.0))
    assert [(advisory.name, advisory.severity) for advisory in found] == [("flat-groups", "notice")]
    assert found[0].cause == "the tasks are solved"


@pytest.mark.parametrize("reward", [-1.0, 0.0, 0.1, 5.0])
def test_tasks_that_all_fail_from_the_start_are_a_warning(reward: float) -> None:
    found = {advisory.name: advisory.severity for advisory in judge(*list_events_with_one_reward(reward))}
    assert found == {"flat-groups": "warning", "reward-stalled": "warning", "entropy-collapse": "warning"}


def test_groups_that_were_dropped_since_they_are_solved_are_a_notice() -> None:
    events = [
        JobStarted(time=T0, node="n0"),
        stamp_event("reward-0", SegmentScored(num=320, rewards={"lake": [1.0] * 320}), time=T0 + 1),
        stamp_event("train-0", FlatGroupsDropped(num=40), time=T0 + 2),
    ]
    assert [advisory.severity for advisory in judge(*events, now=T0 + 3)] == ["notice"]


def test_a_domain_that_fails_beside_a_solved_one_is_not_solved() -> None:
    scored = stamp_event("reward-0", SegmentScored(num=64, rewards={"taxi": [0.0] * 64}), time=T0 + 1)
    found = judge(*list_events_with_one_reward(1.0), scored)
    assert ("flat-groups", "warning") in [(advisory.name, advisory.severity) for advisory in found]


def score_domains(**rewards: list[float]) -> list[CampaignEvent]:
    """Return the events of a campaign that learns, to whose episodes other rewards are added for each step."""
    scored = [
        stamp_event("reward-0", SegmentScored(rewards={name: [value] * 8 for name, value in values.items()}), time=T0)
        for number in range(NUM_STEPS)
        for values in [{name: every[number % len(every)] for name, every in rewards.items()}]
    ]
    return [*list_healthy_events(), *scored]


@pytest.mark.parametrize("reward", [-1.0, 0.0, 0.5])
def test_a_domain_whose_reward_never_changes_is_named_though_the_campaign_learns(reward: float) -> None:
    found = judge(*score_domains(lake=[0.0, 1.0], taxi=[reward]))
    assert [(one.name, one.severity, one.subject) for one in found] == [
        ("reward-stalled", "warning", "taxi"),
        ("flat-groups", "warning", "taxi"),
    ]
    assert f"{reward:g}" in found[0].text


def test_a_domain_that_is_solved_or_has_some_good_episodes_is_not_named() -> None:
    assert judge(*score_domains(lake=[0.0, 1.0], taxi=[1.0])) == []
    assert judge(*score_domains(lake=[0.0, 1.0], taxi=[0.0] * 9 + [1.0])) == []
    assert judge(*score_domains(lake=[0.0, 1.0], taxi=[0.0] * 20 + [0.7] * 40)) == []


def test_a_domain_that_has_fallen_to_one_reward_has_flat_groups() -> None:
    found = judge(*score_domains(lake=[0.0, 1.0], taxi=[0.5, 1.0] * 10 + [0.0] * 40))
    assert [(one.name, one.subject) for one in found] == [("flat-groups", "taxi")]


def test_a_domain_is_judged_once_it_has_enough_rewards() -> None:
    for num, expected in ((15, []), (16, ["flat-groups"])):
        rewards = SegmentScored(rewards={"lake": [0.0, 1.0], "taxi": [0.0] * 8})
        scored = [stamp_event("reward-0", rewards, time=T0 + number) for number in range(num)]
        assert names(judge(*scored, now=T0 + 60)) == expected


def test_many_domains_of_one_reward_are_named_in_one_advisory_for_each_rule() -> None:
    found = judge(*score_domains(lake=[0.0, 1.0], **{f"taxi-{number}": [0.0] for number in range(9)}))
    subject = "taxi-0, taxi-1, taxi-2 and 6 more"
    assert [(one.name, one.subject) for one in found] == [("reward-stalled", subject), ("flat-groups", subject)]


def test_domains_that_are_only_evaluated_are_not_trained_on() -> None:
    assert judge(*score_domains(lake=[0.0, 1.0], **{make_held_out_domain("taxi"): [0.0]})) == []


def list_faults(num: int) -> list[CampaignEvent]:
    """Return the reports of episodes whose environment failed at least once."""
    fault = FaultReported(what="env-fault", detail="the world is gone", domain="lake", id="lake/1/0")
    return [stamp_event("env-0", fault, time=T0 + number) for number in range(num)]


def count_lake_episodes(**outcomes: int) -> CampaignEvent:
    counts = {name.replace("_", "-"): num for name, num in outcomes.items()}
    return stamp_event("env-0", EpisodesCounted(done=sum(counts.values()), outcomes={"lake": counts}), time=T0 + 999)


@pytest.mark.parametrize(("num_faults", "found"), [(20, []), (21, ["env-faults"]), (100, ["env-faults"])])
def test_environments_that_fail_and_are_tried_again_are_named(num_faults: int, found: list[str]) -> None:
    assert names(judge(*list_faults(num_faults), count_lake_episodes(finished=100))) == found


def test_episodes_that_were_lost_are_not_counted_among_those_tried_again() -> None:
    assert judge(*list_faults(5), count_lake_episodes(finished=95, env_fault=5)) == []
    (found,) = judge(*list_faults(24), count_lake_episodes(finished=97, env_fault=3))
    assert found.figure == pytest.approx(0.21)


@pytest.mark.parametrize("num_reports", [1, 100])
def test_episodes_that_were_cut_off_before_the_policy_learned_to_finish_are_not_recent(num_reports: int) -> None:
    before = [count_lake_episodes(truncated=400 * n // num_reports) for n in range(1, num_reports + 1)]
    after = [count_lake_episodes(truncated=400, finished=300 * n // num_reports) for n in range(1, num_reports + 1)]
    assert "truncation" in names(judge(*before))
    assert judge(*before, *after) == []


def test_faults_of_long_ago_are_not_recent() -> None:
    assert judge(*list_faults(1000), count_lake_episodes(finished=1000), count_lake_episodes(finished=20_000)) == []


def test_a_mismatch_of_fresh_trajectories_has_a_lower_limit() -> None:
    assert judge_steps(lambda number: {"kl": 0.05, "lag_max": 0}) == ["logprob-mismatch"]
    assert judge_steps(lambda number: {"kl": 0.05, "lag_max": 2}) == []
    assert judge_steps(lambda number: {"kl": 0.5, "lag_max": 2}) == ["logprob-mismatch"]


def test_tokens_without_lag_show_a_mismatch_that_a_lag_would_hide() -> None:
    assert judge_steps(lambda number: {"kl": 0.1, "lag_max": 2, "kl_fresh": 0.05}) == ["logprob-mismatch"]
    assert judge_steps(lambda number: {"kl": 0.1, "lag_max": 2, "kl_fresh": 0.002}) == []
    assert judge_steps(lambda number: {"kl": 0.1, "lag_max": 2, "kl_fresh": 0.05 if number % 2 else None}) == []


@pytest.mark.parametrize(("kl_fresh", "cause"), [(0.05, "compute differently"), (0.002, "too old")])
def test_the_cause_of_a_mismatch_is_the_lag_if_tokens_without_lag_agree(kl_fresh: float, cause: str) -> None:
    (found,) = judge(*list_healthy_events(lambda number: {"kl": 0.5, "lag_max": 2, "kl_fresh": kl_fresh}))
    causes = ("compute differently", "too old")
    assert [one for one in causes if one in found.cause] == [cause]


def test_a_mismatch_that_grows_is_found_by_the_last_steps_and_one_bad_step_is_none() -> None:
    grown = {"kl": 0.5, "lag_max": 1}
    assert judge_steps(lambda number: grown if number > NUM_STEPS - 3 else {"kl": 0.01}) == ["logprob-mismatch"]
    assert judge_steps(lambda number: grown if number == NUM_STEPS else {"kl": 0.01}) == []


def test_a_mismatch_of_two_steps_after_one_large_update_is_left_alone() -> None:
    """The last steps of a quickstart that ended well, with a reward that fell to 0.78 for one step."""
    spike = {56: (0.058, 0.963), 57: (0.559, 0.867), 58: (1.421, 0.778), 59: (0.002, 0.999), 60: (0.0002, 0.984)}
    spikes = {number: {"kl": kl, "kl_fresh": 5e-9, "reward_mean": reward} for number, (kl, reward) in spike.items()}
    assert judge_steps(lambda number: spikes.get(number, {})) == []
    lasts = {"kl": 0.6, "kl_fresh": 5e-9}
    assert judge_steps(lambda number: lasts if number > NUM_STEPS - 3 else {}) == ["logprob-mismatch"]


def test_a_gradient_that_is_not_finite_is_reported_at_once() -> None:
    assert "gradient-explodes" in judge_steps(lambda number: {"grad_norm": float("nan")} if number == NUM_STEPS else {})


@pytest.mark.parametrize(("figure", "title"), [("kl", "KL"), ("reward_mean", "reward")])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_kl_or_a_reward_that_is_not_finite_is_critical(figure: str, title: str, value: float) -> None:
    found = judge(*list_healthy_events(lambda number: {figure: value} if number > NUM_STEPS - 20 else {}))
    (broken,) = (one for one in found if one.name == "not-finite")
    assert (broken.severity, broken.figure) == ("critical", 20)
    assert title in broken.text


def test_a_figure_that_is_not_finite_is_found_as_it_is_written_to_the_disk() -> None:
    for changes in ({"kl": float("nan")}, {"reward_mean": float("nan")}, {"grad_norm": float("inf")}):
        step = make_learning_step(1, **changes, loss=0.1, num_tokens=100, lags={"1": 8})
        read = msgspec.json.decode(msgspec.json.encode(step), type=StepFinished)
        assert names(judge(read, now=T0 + 90)) == ["gradient-explodes" if "grad_norm" in changes else "not-finite"]


def test_a_step_that_the_trainer_skips_for_its_loss_and_gradient_is_found() -> None:
    skipped = f"loss nan with {SKIPPED_FOR_GRADIENT} nan is not finite"
    step = make_learning_step(1, skipped=skipped, grad_norm=None, kl=None, lags={"1": 8}, num_tokens=100)
    assert names(judge(step, now=T0 + 90)) == ["gradient-explodes"]


def test_figures_that_a_step_does_not_have_are_not_broken() -> None:
    without_rows = make_learning_step(1, skipped="no trainable tokens", kl=None, grad_norm=None, lags={"1": 8})
    warmup = make_learning_step(2, loss=0.1, num_tokens=100, reward_mean=None, kl=None)
    assert judge(without_rows, warmup, make_learning_step(3, lags={"1": 8}), now=T0 + 200) == []


def test_flat_groups_that_the_trainer_dropped_count() -> None:
    dropped = (FlatGroupsDropped(num=200, time=T0 + NUM_STEPS * STEP_S),)
    assert names(judge(*list_healthy_events(), *dropped)) == ["flat-groups"]


@pytest.mark.parametrize(("num", "found"), [(15, []), (16, ["flat-groups"])])
def test_flat_groups_are_found_soon_where_no_other_group_was_ever_seen(num: int, found: list[str]) -> None:
    dropped = [FlatGroupsDropped(num=1, time=T0 + number) for number in range(num)]
    assert names(judge(*dropped, now=T0 + 60)) == found
    step = make_learning_step(1, num_groups=num, num_flat_groups=num)
    assert names(judge(step, now=T0 + 60)) == found


def test_flat_groups_of_the_first_steps_are_no_finding_once_one_group_was_not_flat() -> None:
    flat = make_learning_step(2, num_groups=30, num_flat_groups=30)
    assert judge(make_learning_step(1, num_groups=8, num_flat_groups=7), flat, now=T0 + 60) == []


@pytest.mark.parametrize("outcome", ["exit", "env-fault"])
def test_groups_that_are_flat_since_every_domain_fails_are_not_reported_beside_that(outcome: str) -> None:
    dropped = FlatGroupsDropped(num=40, domains={"lake": 40}, time=T0)
    assert names(judge(count_lake_episodes(**{outcome: 400}), dropped)) == ["domain-fails"]
    assert names(judge(fail_rewards(400, as_fault=False), dropped)) == ["domain-fails"]


def test_flat_groups_of_a_domain_that_fails_do_not_count_against_another() -> None:
    outcomes = {"lake": {"finished": 400}, "taxi": {"exit": 400}}
    counts = stamp_event("env-0", EpisodesCounted(outcomes=outcomes), time=T0)
    step = make_learning_step(1, num_groups=40, num_flat_groups=2)
    of_taxi = FlatGroupsDropped(num=80, domains={"taxi": 80}, time=T0)
    assert names(judge(counts, step, of_taxi, now=T0 + 60)) == ["domain-fails"]
    of_lake = FlatGroupsDropped(num=80, domains={"lake": 80}, time=T0)
    assert names(judge(counts, step, of_lake, now=T0 + 60)) == ["domain-fails", "flat-groups"]


def test_flat_groups_of_solved_tasks_are_only_a_notice() -> None:
    solved = judge(*list_healthy_events(lambda number: {"num_flat_groups": 7 if number > 40 else 1}))
    assert [(one.name, one.severity) for one in solved] == [("flat-groups", "notice")]


def fail_rewards(num: int, *, as_fault: bool) -> CampaignEvent:
    failed = {"lake": {"finished": num}}
    if as_fault:
        event = SegmentScored(num=0, rewards={}, reward_faults=failed)
    else:
        event = SegmentScored(
            num=num, rewards={"lake": [0.0] * num}, reward_errors={"lake": num}, replaced_outcomes=failed
        )
    return stamp_event("reward-0", event, time=T0)


@pytest.mark.parametrize("as_fault", [True, False])
def test_a_domain_whose_rewards_all_fail_is_critical(as_fault: bool) -> None:
    played = stamp_event("env-0", EpisodesCounted(done=16, outcomes={"lake": {"finished": 16}}), time=T0)
    found = judge(played, fail_rewards(16, as_fault=as_fault))
    assert [(one.name, one.severity, one.subject, one.figure) for one in found] == [
        ("domain-fails", "critical", "lake", 16)
    ]
    assert "all 16 rewards failed" in describe_advisory(found[0])


@pytest.mark.parametrize("outcome", ["env-fault", "policy-fault", "timeout", "exit"])
def test_a_domain_whose_episodes_all_fail_is_critical(outcome: str) -> None:
    found = judge(stamp_event("env-0", EpisodesCounted(outcomes={"lake": {outcome: 20}}), time=T0))
    assert names(found) == ["domain-fails"]
    assert outcome in found[0].cause
    has_records = outcome in ("timeout", "exit")
    command = "`hpcrl traj ls one --domain lake`" if has_records else "`hpcrl events one --kind fault`"
    assert command in found[0].remedy


def test_a_domain_that_fails_after_it_was_good_is_critical() -> None:
    last = {"lake": {"finished": 60 * NUM_STEPS, "max-turns": 4 * NUM_STEPS, "env-fault": 5000}}
    counts = EpisodesCounted(done=60 * NUM_STEPS, truncated=4 * NUM_STEPS, outcomes=last)
    found = judge(*list_healthy_events(), stamp_event("env-0", counts, time=T0 + 9e3))
    assert found[0].name == "domain-fails"
    assert "the last" in found[0].text


def test_a_good_domain_is_not_blamed_for_a_bad_one() -> None:
    outcomes = {"lake": {"finished": 100}, "taxi": {"exit": 100}}
    found = judge(stamp_event("env-0", EpisodesCounted(outcomes=outcomes), time=T0))
    assert [one.subject for one in found] == ["taxi"]


@pytest.mark.parametrize(
    ("counts", "name"),
    [
        ({"finished": 40, "exit": 60}, "domain-failing"),
        ({"finished": 90, "env-fault": 10}, "env-faults"),
        ({"finished": 60, "overflow": 40}, "truncation"),
    ],
)
def test_an_advisory_fires_on_outcomes_that_are_made_bad(counts: dict[str, int], name: str) -> None:
    assert names(judge(stamp_event("env-0", EpisodesCounted(outcomes={"lake": counts}), time=T0))) == [name]


def test_episodes_that_use_up_their_turns_are_normal_before_training() -> None:
    counts = EpisodesCounted(outcomes={"lake": {"finished": 10, "max-turns": 90}})
    assert judge(stamp_event("env-0", counts, time=T0)) == []
    trained = [make_learning_step(number) for number in range(1, NUM_STEPS + 1)]
    assert [(one.name, one.severity) for one in judge(stamp_event("env-0", counts, time=T0), *trained)] == [
        ("truncation", "notice")
    ]


def test_episodes_that_become_too_old_are_reported() -> None:
    counts = stamp_event("env-0", EpisodesCounted(done=80, outcomes={"lake": {"finished": 80}}), time=T0)
    assert judge(counts) == []
    assert names(judge(counts, StaleDropped(num=30, time=T0))) == ["stale-episodes"]
    aborted = stamp_event("env-1", EpisodesCounted(aborted_stale=40, outcomes={"lake": {"aborted-stale": 40}}), time=T0)
    assert names(judge(counts, aborted)) == ["stale-episodes"]


def test_episodes_that_a_trainer_drops_twice_count_at_most_once() -> None:
    counts = stamp_event("env-0", EpisodesCounted(done=100, outcomes={"lake": {"done": 100}}), time=T0)
    (found,) = judge(counts, StaleDropped(num=100, time=T0), StaleDropped(num=100, time=T0))
    assert (found.name, found.figure) == ("stale-episodes", 1.0)


def test_what_steps_generated_that_a_resume_repeats_is_not_reported_as_too_old() -> None:
    counts = stamp_event("env-0", EpisodesCounted(done=80, outcomes={"lake": {"finished": 80}}), time=T0)
    steps = [make_learning_step(number) for number in range(1, 4)]
    resumed = TrainingResumed(step=2, version=2, time=T0)
    dropped = StaleDropped(num=30, time=T0)
    assert names(judge(counts, *steps, resumed, dropped, is_running=False)) == []
    later = stamp_event("env-0", EpisodesCounted(done=160, outcomes={"lake": {"finished": 160}}), time=T0)
    stale = judge(counts, *steps, resumed, dropped, make_learning_step(3), later, dropped, is_running=False)
    assert names(stale) == ["stale-episodes"]


def test_only_episodes_of_recent_steps_count_as_stale() -> None:
    """A campaign of a million good episodes is found within some steps, and one that has recovered is left alone."""
    counts: dict[str, int] = {"done": 1_000_000}
    events: list[CampaignEvent] = [stamp_event("env-0", EpisodesCounted(**counts), time=T0)]

    def add_steps(first: int, num: int, **added: int) -> None:
        for number in range(first, first + num):
            for name, increment in added.items():
                counts[name] = counts.get(name, 0) + increment
            time = T0 + number * STEP_S
            events.append(stamp_event("env-0", EpisodesCounted(**counts), time=time))
            events.append(make_learning_step(number))

    add_steps(1, 25, done=64)
    assert names(judge(*events, is_running=False)) == []
    add_steps(26, 20, done=64, aborted_stale=64)
    assert names(judge(*events, is_running=False)) == ["stale-episodes"]
    add_steps(46, 25, done=64)
    assert names(judge(*events, is_running=False)) == []


def test_idle_engines_are_reported() -> None:
    idle = [stamp_event("decode-0", EngineCounted(window_s=10.0, busy_share=0.05), time=T0 + 1e4) for _ in range(200)]
    found = judge(*list_healthy_events(), *idle)
    assert [(one.name, one.subject) for one in found] == [("engines-idle", "decode")]
    ended = stamp_event("decode-0", WorkerEnded(reason="the job is ending"), time=T0 + 2e4)
    assert names(judge(*list_healthy_events(), *idle, ended, is_running=False)) == ["engines-idle"]


def report_loads(num_engines: int = 2, **load: float | None) -> list[CampaignEvent]:
    """Return the loads of engines that always have a request to run."""
    values = {"window_s": 10.0, "busy_share": 1.0, "running": 1.0, "num_places": 256, "kv_share": 0.01} | load
    return [
        stamp_event(f"decode-{number}", EngineCounted(**values), time=T0 + 1e4)  # type: ignore[arg-type]
        for number in range(num_engines)
        for _ in range(100)
    ]


def test_engines_that_run_one_of_hundreds_of_requests_are_idle() -> None:
    (found,) = judge(*list_healthy_events(), *report_loads())
    assert (found.name, found.subject, found.unit) == ("engines-idle", "decode", "share of places")
    assert "ran 1.0 requests at once" in found.text
    assert names(judge(*list_healthy_events(), *report_loads(kv_share=None))) == ["engines-idle"]


@pytest.mark.parametrize(
    "load", [{"running": 30.0}, {"kv_share": 0.3}, {"num_places": 2}, {"num_places": 64}, {"num_places": None}]
)
def test_engines_of_few_places_of_much_kv_or_of_many_requests_are_not_idle(load: dict[str, float | None]) -> None:
    assert judge(*list_healthy_events(), *report_loads(**load)) == []


def test_engines_that_wait_for_the_trainer_are_named_with_it_unless_there_is_one() -> None:
    events = list(list_healthy_events(lambda number: {"wait_s": 0.02 * STEP_S, "step_s": 0.98 * STEP_S}))
    assert judge(*events, *report_loads(num_engines=1)) == []
    assert names(judge(*list_healthy_events(), *report_loads(num_engines=1))) == ["engines-idle"]
    for load in ({}, {"busy_share": 0.1}):
        (found,) = judge(*events, *report_loads(num_engines=4, **load))
        assert found.cause.startswith("the trainer is slower")


def test_prefill_engines_are_not_judged_by_their_places() -> None:
    loads = [
        stamp_event("prefill-0", EngineCounted(window_s=10.0, busy_share=0.6, running=1.0, num_places=256), time=T0)
        for _ in range(100)
    ]
    assert judge(*list_healthy_events(), *loads) == []


def test_idle_prefill_engines_are_a_notice_where_prompts_are_short() -> None:
    def report(busy_share: float) -> list[CampaignEvent]:
        shares = {"prefill-0": 0.01, "decode-0": busy_share}
        return [
            stamp_event(name, EngineCounted(window_s=10.0, busy_share=share), time=T0 + 1e4)
            for name, share in shares.items()
            for _ in range(100)
        ]

    (found,) = judge(*list_healthy_events(), *report(0.8))
    assert (found.name, found.severity, found.subject) == ("engines-idle", "notice", "prefill")
    assert "prompts are short" in found.cause
    both = judge(*list_healthy_events(), *report(0.01))
    assert {(one.severity, one.subject) for one in both} == {("warning", "prefill"), ("warning", "decode")}


def test_a_trainer_that_waits_is_judged_by_time_from_two_steps_on() -> None:
    """The first step of a job does not count: its wait has the start of all workers in it."""

    def list_steps(num: int, *, wait_share: float, step_s: float = 1200.0) -> Iterator[CampaignEvent]:
        yield JobStarted(time=T0, node="n0")
        for number in range(1, num + 1):
            share = 0.95 if number == 1 else wait_share
            yield make_learning_step(
                number, wait_s=share * step_s, step_s=(1 - share) * step_s, time=T0 + number * step_s
            )

    assert names(judge(*list_steps(4, wait_share=0.9), now=T0 + 5000, is_running=False)) == ["trainer-waits"]
    assert names(judge(*list_steps(3, wait_share=0.9), now=T0 + 3600)) == ["trainer-waits"]
    assert judge(*list_steps(2, wait_share=0.9), now=T0 + 2500) == []
    assert judge(*list_steps(4, wait_share=0.3), now=T0 + 5000, is_running=False) == []
    assert judge(*list_steps(4, wait_share=0.9, step_s=60.0), now=T0 + 300) == []


def test_a_trainer_that_waits_in_short_steps_is_judged_by_as_many_as_fill_ten_minutes() -> None:
    def list_steps(num: int) -> Iterator[StepFinished]:
        for number in range(1, num + 1):
            yield make_learning_step(number, wait_s=9.0, step_s=1.0, time=T0 + 10 * number, reward_mean=number / num)

    assert names(judge(*list_steps(55), now=T0 + 600)) == []
    (found,) = judge(*list_steps(100), now=T0 + 1000)
    assert (found.name, found.text) == ("trainer-waits", "the trainer waited 90% of the time of the last 60 steps")


def test_workers_that_die_again_and_again_are_reported_with_their_reason() -> None:
    killed = WorkerFailed(reason="killed by signal 9")
    died = [stamp_event("env-0", killed, time=T0 + minutes * 60) for minutes in (2, 3, 50)]
    found = judge(*list_healthy_events(), *died)
    assert [(one.name, one.subject, one.cause) for one in found] == [("workers-die", "env", "killed by signal 9")]
    assert judge(*list_healthy_events(), died[0]) == []
    assert names(judge(*list_healthy_events(), *died, now=T0 + 1e6, is_running=False)) == ["workers-die"]


def lose_workers(num: int, *, times: list[float]) -> list[CampaignEvent]:
    """Return the events of a role of this many workers, all of which are lost each time."""
    started = [stamp_event(f"env-{number}", WorkerStarted(pid=1), time=T0) for number in range(num)]
    lost = [
        stamp_event(f"env-{number}", WorkerFailed(reason="node lost"), time=time)
        for time in times
        for number in range(num)
    ]
    return [*list_healthy_events(), *started, *lost]


def test_workers_that_were_lost_once_at_once_are_one_incident() -> None:
    assert judge(*lose_workers(64, times=[T0 + 600])) == []
    (found,) = judge(*lose_workers(64, times=[T0 + 600, T0 + 1200, T0 + 1800]))
    assert (found.name, found.severity, found.figure) == ("workers-die", "warning", 3)
    assert found.text == "env workers failed 192 times in the last hour, one of them 3"


def test_a_large_role_may_lose_more_workers_but_none_again_and_again() -> None:
    workers = lose_workers(1000, times=[])

    def lose_one(*numbers: int) -> list[CampaignEvent]:
        failed = WorkerFailed(reason="node lost")
        return [stamp_event(f"env-{one}", failed, time=T0 + 240 * index) for index, one in enumerate(numbers, 1)]

    assert judge(*workers, *lose_one(*range(12))) == []
    assert names(judge(*workers, *lose_one(*range(13)))) == ["workers-die"]
    assert names(judge(*list_healthy_events(), *lose_one(1, 2, 3))) == ["workers-die"]
    assert names(judge(*workers, *lose_one(7, 7, 7))) == ["workers-die"]
    assert [one.severity for one in judge(*workers, *lose_one(*[7] * 10))] == ["critical"]


def test_a_failure_that_the_worker_and_the_driver_report_is_one() -> None:
    def fail(num: int) -> list[CampaignEvent]:
        times = [T0 + 600 * number for number in range(1, num + 1)]
        own = [stamp_event("env-0", WorkerFailed(of="000-env-0", reason="it raised"), time=time) for time in times]
        driver = {"role": "driver", "worker": "000-driver"}
        return own + [WorkerFailed(of="env-0", reason="it raised", time=time + 2, **driver) for time in times]

    assert judge(*list_healthy_events(), *fail(2)) == []
    (found,) = judge(*list_healthy_events(), *fail(3))
    assert (found.name, found.text) == ("workers-die", "env workers failed 3 times in the last hour")


def test_workers_that_failed_one_by_one_in_days_are_not_a_sign() -> None:
    died = [stamp_event(f"env-{day}", WorkerFailed(reason="node lost"), time=T0 + 86400 * day) for day in range(12)]
    steps = list(list_healthy_events(lambda number: {"time": T0 + number * 5 * 3600.0}))
    assert "workers-die" not in names(judge(*steps, *died, now=T0 + 12 * 86400))
    assert "workers-die" not in names(judge(*steps, *died, now=T0 + 12 * 86400, is_running=False))


@pytest.mark.parametrize("reason", ["I/O error: No space left on device", "OSError: [Errno 122] Disk quota exceeded"])
def test_workers_that_die_of_a_full_disk_blame_no_node(reason: str) -> None:
    died = [stamp_event("train-0", WorkerFailed(reason=reason), time=T0 + 600) for _ in range(3)]
    (found,) = judge(*list_healthy_events(), *died)
    assert "hpcrl gc" in found.remedy
    assert "node" not in found.remedy


def report_full_disk(time: float, *, job: int = 0, **changes: str) -> CampaignEvent:
    detail = "cannot write segment '/home/a/000-env-0.h5': OSError: [Errno 28] No space left on device"
    fault = FaultReported(**({"what": "spool", "detail": detail, "job": job} | changes))  # type: ignore[arg-type]
    return stamp_event("env-0", fault, time=time)


def test_a_full_disk_is_critical_from_its_first_fault_until_a_step_is_made() -> None:
    last = T0 + NUM_STEPS * STEP_S
    events = [*list_healthy_events(), report_full_disk(last + 5)]
    (found,) = judge(*events, now=last + 240)
    assert (found.name, found.severity) == ("disk-full", "critical")
    assert "No space left on device" in found.cause
    assert "hpcrl gc" in found.remedy
    assert judge(*events, now=last + 240, is_running=False) == []
    late = {one.name: one.cause for one in judge(*events, now=last + 3000)}
    assert late["step-overdue"] == "the disk is full"
    step = make_learning_step(NUM_STEPS + 1, time=last + 200)
    assert names(judge(*events, step, now=last + 100)) == ["disk-full"]
    assert judge(*events, step, now=last + 240) == []


def test_a_disk_that_was_full_in_an_earlier_job_is_not_full_now() -> None:
    last = T0 + NUM_STEPS * STEP_S
    started = JobStarted(job=1, time=last + 60)
    assert judge(*list_healthy_events(), report_full_disk(last + 5), started, now=last + 90) == []


def test_a_full_disk_of_an_environment_is_its_domains_fault() -> None:
    last = T0 + NUM_STEPS * STEP_S
    fault = report_full_disk(last + 5, what="env-fault", domain="lake")
    assert judge(*list_healthy_events(), fault, now=last + 30) == []


def test_a_step_that_is_overdue_is_reported_while_a_job_runs() -> None:
    late = T0 + NUM_STEPS * STEP_S + 7 * STEP_S
    assert names(judge(*list_healthy_events(), now=late)) == ["step-overdue"]
    assert judge(*list_healthy_events(), now=late, is_running=False) == []


def start_campaign(*events: CampaignEvent, without: str = "") -> list[CampaignEvent]:
    """Return the start of a campaign whose workers are up, but for those of one role, and what comes then."""
    workers = [worker for worker in ("train-0", "decode-0", "env-0") if worker != f"{without}-0"]
    started = [stamp_event(worker, WorkerStarted(pid=1), time=T0) for worker in workers]
    busy = stamp_event("decode-0", EngineCounted(window_s=300.0, busy_share=1.0), time=T0 + 900)
    return [JobStarted(time=T0, node="n0"), *started, *([busy] if without != "decode" else []), *events]


def test_a_campaign_that_makes_no_first_step_within_an_hour_is_named() -> None:
    assert judge(*start_campaign(), now=T0 + 3500) == []
    (found,) = judge(*start_campaign(), now=T0 + 3700)
    assert (found.name, found.severity, found.threshold) == ("step-overdue", "warning", 3600)
    assert judge(*start_campaign(), now=T0 + 6 * 3600, is_running=False) == []
    first = make_learning_step(1, time=T0 + 3300)
    assert judge(*start_campaign(first), now=T0 + 9000, checkpoint_every=10) == []


@pytest.mark.parametrize(
    ("events", "cause"),
    [
        ([], "no episode has ended"),
        ([EpisodesCounted(done=8, outcomes={"lake": {"finished": 8}})], "none has a reward yet"),
        ([SegmentScored(rewards={"lake": [0.0, 1.0] * 8})], "episodes have rewards: the trainer"),
        ([FlatGroupsDropped(num=9, domains={"lake": 9})], "the trainer drops groups"),
        ([EpisodesCounted(outcomes={"lake": {"exit": 400}})], "all episodes or rewards fail"),
        ([FaultReported(what="spool", detail="OSError: [Errno 28] No space left on device")], "the disk is full"),
    ],
)
def test_the_cause_of_a_first_step_that_is_missing_is_the_first_that_makes_nothing(
    events: list[CampaignEvent], cause: str
) -> None:
    stamped = [stamp_event("env-0", event, time=T0 + 600) for event in events]
    causes = {one.name: one.cause for one in judge(*start_campaign(*stamped), now=T0 + 7200)}
    assert cause in causes["step-overdue"]


@pytest.mark.parametrize(
    ("role", "cause"),
    [("train", "the trainer is not up"), ("env", "no env worker is up"), ("decode", "no episode has ended")],
)
def test_the_cause_of_a_first_step_that_is_missing_may_be_a_role_that_is_not_up(role: str, cause: str) -> None:
    (found,) = judge(*start_campaign(without=role), now=T0 + 7200)
    assert found.cause.startswith(cause)


@pytest.mark.parametrize("num_steps", [1, 2, 4])
def test_a_job_that_hangs_after_few_steps_is_named_and_lacks_no_checkpoint(num_steps: int) -> None:
    steps = [make_learning_step(number, time=T0 + 600 * number) for number in range(1, num_steps + 1)]
    last = T0 + 600 * num_steps
    assert judge(*start_campaign(*steps), now=last + 1500, checkpoint_every=10) == []
    (found,) = judge(*start_campaign(*steps), now=last + 6 * 3600, checkpoint_every=10)
    assert (found.name, found.severity) == ("step-overdue", "critical")
    assert "10 min" in found.text


def test_a_campaign_without_checkpoints_for_an_hour_is_reported_while_a_job_runs() -> None:
    events = [event for event in list_healthy_events() if not isinstance(event, CheckpointSaved)]
    late = T0 + 3700
    assert names(judge(*events, now=late)) == ["no-checkpoint"]
    assert judge(*events, now=late, is_running=False) == []


def test_long_steps_have_their_first_checkpoints_late() -> None:
    step_s = 900.0
    steps = [make_learning_step(number, time=T0 + number * step_s) for number in range(1, 20)]
    saved = stamp_event("train-0", CheckpointSaved(step=10), time=T0 + 10 * step_s)
    for events, last in ((steps[:9], 9), ([*steps, saved], 19)):
        progress = CampaignProgress()
        for event in (JobStarted(time=T0, node="n0"), *events):
            progress.add(event)
        for every, expected in ((10, []), (1, ["no-checkpoint"])):
            facts = HealthFacts(
                campaign="one", progress=progress, now=T0 + last * step_s, is_running=True, checkpoint_every=every
            )
            assert [one for one in names(find_advisories(facts)) if one == "no-checkpoint"] == expected


def test_a_trainer_without_memory_is_noticed() -> None:
    short = MemoryRanOut(step=3, num_tokens=9000, tokens_per_micro_batch=4096, time=T0)
    assert [(one.name, one.severity) for one in judge(*list_healthy_events(), short)] == [("memory-short", "notice")]


def test_the_worst_comes_first() -> None:
    events = [*list_healthy_events(lambda number: {"kl": 0.5, "num_flat_groups": 6, "reward_mean": 0.3})]
    severities = [one.severity for one in judge(*events)]
    assert severities == sorted(severities, key=["critical", "warning", "notice"].index)
    assert len(severities) >= 3
