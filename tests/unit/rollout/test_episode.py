"""One episode, against small environments and a scripted model."""

import asyncio
import itertools
import threading

import msgspec
import numpy as np
import pytest

from hpcrl.engines.base import Completion
from hpcrl.envs.base import Step, TaskPrompt, adapt_env
from hpcrl.errors import EngineError
from hpcrl.rollout.episode import EpisodeLimits, retry_pause_s, run_episode
from hpcrl.rollout.tasks import AgentTask
from hpcrl.rollout.turn import MAX_INTERRUPTIONS
from hpcrl.spool.rows import expand_row
from hpcrl.testing.virtual_time import run_virtual
from tests.support.completions import make_completion
from tests.support.reported_experts import check_known, report_experts

TASK = AgentTask(domain="lake", number=3, seed=11)
END = 0


class Letters:
    """A layout with one token per character, and observations in brackets."""

    stop_token_ids = (END,)

    def first_turn(self, observation):
        return [ord(c) for c in f"[{observation}]"]

    def next_turn(self, observation, *, generated):
        return [*([] if generated and generated[-1] == END else [END]), *self.first_turn(observation)]

    def decode(self, token_ids):
        return "".join(map(chr, token_ids))


class ScriptedPolicy:
    """Generates these words, one per turn; an exception among them is raised."""

    def __init__(self, *words, version=5):
        self.words = list(words)
        self.version = version
        self.requests = []
        self.left = []
        self.asked = asyncio.Event()

    async def generate(self, request):
        self.requests.append(request)
        self.asked.set()
        word = self.words.pop(0)
        if isinstance(word, Exception):
            raise word
        if word is None:
            try:
                await asyncio.Event().wait()
            finally:
                self.left.append(request.request_id)
        if isinstance(word, Completion):
            return word
        return complete_word(word, version=self.version, limit=request.max_new_tokens)


def complete_word(word, *, version=5, limit=100, **changed):
    """Return a completion; a full stop at the end of a word is the stop token."""
    ids = ([ord(c) for c in word.rstrip(".")] + [END] * word.endswith("."))[:limit]
    return make_completion(ids, version=version, logprobs=[-0.5 - i for i in range(len(ids))], **changed)


class WordEnv:
    """Returns each action as the observation, with reward 1; the action `done` ends it."""

    made = 0

    def __init__(self):
        type(self).made += 1
        self.actions = []
        self.closed = False

    async def reset(self, seed):
        return f"s{seed}"

    async def step(self, action):
        self.actions.append(action)
        return Step(observation=action, reward=1.0, done=action == "done")

    async def close(self):
        self.closed = True


def run(policy, *, make_env=WordEnv, newest_version=lambda: 5, index=2, layout=None, needed_version=0, **changed):
    async def made():
        return make_env()

    limits = {"max_turns": 4, "max_new_tokens": 8, "context_length": 200, "max_lag": 1, "first_pause_s": 0.001}
    return run_episode(
        TASK,
        index=index,
        make_env=made,
        layout=layout or Letters(),
        policy=policy,
        limits=EpisodeLimits(**(limits | changed)),
        newest_version=newest_version,
        producer="000-env-0",
        needed_version=needed_version,
    )


def played(*words, **changed):
    return asyncio.run(run(ScriptedPolicy(*words), **changed))


def test_every_token_is_recorded_as_it_came():
    trajectory = played("hi.", "done.")
    assert "".join(map(chr, trajectory.token_ids)) == "[s11]hi\0[hi]done\0"
    assert list(trajectory.loss_mask) == [False] * 5 + [True] * 3 + [False] * 4 + [True] * 5
    assert list(trajectory.logprobs[5:8]) == [-0.5, -1.5, -2.5]
    assert list(trajectory.versions) == [5 * bool(mine) for mine in trajectory.loss_mask]
    assert not trajectory.logprobs[~trajectory.loss_mask].any()
    assert [(turn.start, turn.end, turn.reward) for turn in trajectory.turns] == [(5, 8, 1.0), (12, 17, 1.0)]


class ReportingPolicy(ScriptedPolicy):
    """Reports the experts that it is asked for, with all turns but those of these numbers."""

    def __init__(self, *words, silent=()):
        super().__init__(*words)
        self.silent = silent

    async def generate(self, request):
        number = len(self.requests)
        completion = await super().generate(request)
        ids = [*request.token_ids, *completion.token_ids]
        spans = [] if number in self.silent else report_experts(ids, request.experts_from)
        return msgspec.structs.replace(completion, experts=spans)


@pytest.mark.parametrize(("silent", "asked"), [((), [0, 7, 14]), ((1,), [0, 7, 7]), ((0, 1), [0, 0, 0])])
def test_experts_are_asked_for_once_and_known_of_all_tokens_that_a_turn_read(silent, asked):
    policy = ReportingPolicy("hi.", "ho.", "done.", silent=silent)
    trajectory = asyncio.run(run(policy, records_experts=True))
    assert "".join(map(chr, trajectory.token_ids)) == "[s11]hi\0[hi]ho\0[ho]done\0"
    assert [request.experts_from for request in policy.requests] == asked
    check_known(expand_row(trajectory, 0), [True] * (len(trajectory) - 1) + [False])


def test_tokens_after_the_last_report_have_no_choice():
    trajectory = asyncio.run(run(ReportingPolicy("hi.", "done.", silent=(1,)), records_experts=True))
    check_known(expand_row(trajectory, 0), [True] * 7 + [False] * (len(trajectory) - 7))


def test_experts_are_not_asked_for_unless_they_are_recorded():
    policy = ReportingPolicy("hi.", "done.")
    assert asyncio.run(run(policy)).experts is None
    assert [request.experts_from for request in policy.requests] == [None, None]


def test_only_the_first_turn_waits_for_the_version_that_the_episode_needs():
    policy = ScriptedPolicy("hi.", "done.")
    asyncio.run(run(policy, needed_version=5))
    assert [request.min_version for request in policy.requests] == [5, 0]


def test_columns_have_the_types_of_the_record():
    trajectory = played("done.")
    columns = (trajectory.token_ids, trajectory.logprobs, trajectory.versions, trajectory.loss_mask)
    assert [column.dtype for column in columns] == [np.int32, np.float32, np.int32, np.bool_]


def test_a_trajectory_names_its_group_and_producer():
    trajectory = played("done.")
    assert (trajectory.id, trajectory.group, trajectory.domain) == ("lake/3/2", "lake/3", "lake")
    assert (trajectory.seed, trajectory.producer, trajectory.status) == (11, "000-env-0", "done")
    assert (trajectory.start_version, trajectory.end_version, trajectory.reward) == (5, 5, None)


def test_a_turn_without_its_closing_token_is_closed_by_the_layout():
    trajectory = played("hi", "done.")
    assert "".join(map(chr, trajectory.token_ids)) == "[s11]hi\0[hi]done\0"
    assert list(trajectory.loss_mask[5:8]) == [True, True, False]


def test_the_prompt_of_a_turn_is_all_that_was_before_it():
    policy = ScriptedPolicy("hi.", "done.")
    asyncio.run(run(policy))
    first, second = policy.requests
    assert second.token_ids == [*first.token_ids, ord("h"), ord("i"), END, *map(ord, "[hi]")]
    assert first.stop_token_ids == [END]


def test_seeds_differ_between_episodes_and_turns_and_are_the_same_again():
    def seeds(index):
        policy = ScriptedPolicy("a", "b", "c", "done")
        asyncio.run(run(policy, index=index))
        return [request.seed for request in policy.requests]

    assert seeds(0) == seeds(0)
    assert len({*seeds(0), *seeds(1)}) == 8


def test_max_turns_truncates():
    trajectory = played("a", "b", max_turns=2)
    assert trajectory.status == "truncated"
    assert len(trajectory.turns) == 2
    assert chr(trajectory.token_ids[-1]) == "b"


def test_the_context_truncates_before_what_does_not_fit():
    trajectory = played("ab", "cd", "ef", context_length=13)
    assert trajectory.status == "truncated"
    assert "".join(map(chr, trajectory.token_ids)) == "[s11]ab\0[ab]c"


def test_a_turn_may_generate_no_more_than_the_context_holds():
    policy = ScriptedPolicy("ab", "done")
    asyncio.run(run(policy, context_length=13))
    assert [request.max_new_tokens for request in policy.requests] == [8, 1]


def test_a_first_observation_that_does_not_fit_is_a_fault():
    trajectory = played(context_length=5)
    assert trajectory.status == "env-fault"
    assert "5 tokens" in trajectory.extra["fault"]


def test_an_episode_too_far_behind_is_aborted_after_its_turn():
    newest = itertools.chain([5, 5, 6, 7], itertools.repeat(7))
    trajectory = played("a", "b", "c", "done", newest_version=lambda: next(newest))
    assert trajectory.status == "aborted-stale"
    assert len(trajectory.turns) == 3


def test_staleness_counts_from_the_weights_that_really_acted():
    trajectory = asyncio.run(run(ScriptedPolicy("a", "done", version=3), newest_version=lambda: 5))
    assert (trajectory.status, trajectory.start_version) == ("aborted-stale", 3)


def test_what_waited_long_for_its_first_turn_is_as_old_as_the_weights_of_that():
    trajectory = asyncio.run(run(ScriptedPolicy("a", "done", version=8), newest_version=lambda: 5))
    assert (trajectory.status, trajectory.start_version) == ("done", 8)


def test_max_lag_is_still_allowed():
    newest = itertools.chain([5], itertools.repeat(6))
    assert played("a", "done", newest_version=lambda: next(newest)).status == "done"


def test_an_engine_that_fails_is_a_policy_fault_with_its_reason():
    trajectory = played("a", EngineError("no decode worker"))
    assert trajectory.status == "policy-fault"
    assert trajectory.extra["fault"] == "no decode worker"
    assert len(trajectory.turns) == 1


def test_an_incomplete_completion_is_a_policy_fault():
    torn = make_completion([1, 2], version=5, logprobs=[0.0])
    trajectory = played(torn)
    assert trajectory.status == "policy-fault"
    assert "2 tokens, 1 log-probabilities" in trajectory.extra["fault"]


def test_an_interrupted_turn_continues():
    half = complete_word("do", version=5, finish_reason="aborted", remote_prefill=True)
    policy = ScriptedPolicy(half, complete_word("ne.", version=6))
    trajectory = asyncio.run(run(policy))
    assert trajectory.status == "done"
    assert [(turn.start, turn.end, turn.remote_prefill) for turn in trajectory.turns] == [(5, 10, True)]
    assert list(trajectory.versions[5:]) == [5, 5, 6, 6, 6]
    assert [request.max_new_tokens for request in policy.requests] == [8, 6]
    assert len({request.request_id for request in policy.requests}) == 2


def test_engines_that_always_interrupt_are_a_policy_fault():
    nothing = make_completion([], finish_reason="aborted")
    policy = ScriptedPolicy(*[nothing] * 20)
    trajectory = asyncio.run(run(policy))
    assert trajectory.status == "policy-fault"
    assert len(policy.requests) == MAX_INTERRUPTIONS + 1
    assert f"interrupted this turn {len(policy.requests)} times" in trajectory.extra["fault"]


class Faulty(WordEnv):
    """Fails as listed, once for each entry: in reset, in step, or with an invalid result."""

    faults = []
    envs = []
    release = asyncio.Event()

    def __init__(self):
        super().__init__()
        self.envs.append(self)
        self.fault = self.faults.pop(0) if self.faults else None

    async def reset(self, seed):
        match self.fault:
            case "reset raises":
                raise OSError("no more processes")
            case "reset hangs":
                await asyncio.Event().wait()
            case "reset gives bytes":
                return b"s"
        return await super().reset(seed)

    async def step(self, action):
        match self.fault:
            case "step raises":
                raise KeyError("lost")
            case "step hangs":
                await asyncio.Event().wait()
            case "step ignores being cancelled":
                while True:
                    try:
                        await self.release.wait()
                    except asyncio.CancelledError:
                        continue
                    break
            case "step gives None":
                return None
            case "step gives NaN":
                return Step(observation="", reward=float("nan"))
            case "step gives text for a reward":
                return Step(observation="", reward="much")
            case "step is cancelled from within":
                raise asyncio.CancelledError
        return await super().step(action)


@pytest.fixture
def faulty(monkeypatch):
    def use(*faults):
        monkeypatch.setattr(Faulty, "faults", list(faults))
        monkeypatch.setattr(Faulty, "envs", [])
        return Faulty

    return use


FAULTS = [
    "reset raises",
    "reset hangs",
    "reset gives bytes",
    "step raises",
    "step gives None",
    "step is cancelled from within",
]
FAILURES = [
    ("step hangs", "truncated", "timeout", "no answer in step_timeout_s = 0.02 s"),
    ("step gives NaN", "done", "reward-error", "the reward nan"),
    ("step gives text for a reward", "done", "reward-error", "the reward 'much'"),
]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_restarts_the_episode(faulty, fault):
    make_env = faulty(fault)
    words = ["done.", "done."] if fault.startswith("step") else ["done."]
    trajectory = played(*words, make_env=make_env, reset_timeout_s=0.02, step_timeout_s=0.02)
    assert trajectory.status == "done"
    assert len(trajectory.turns) == 1
    assert trajectory.extra["attempts"] == 2
    assert all(env.closed for env in make_env.envs)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_stays_is_never_scored(faulty, fault):
    trajectory = played(
        *["done."] * 3, make_env=faulty(*[fault] * 3), reset_timeout_s=0.02, step_timeout_s=0.02, env_retries=2
    )
    assert trajectory.status == "env-fault"
    assert trajectory.reward is None
    assert trajectory.extra["attempts"] == 3
    assert trajectory.extra["fault"]


@pytest.mark.parametrize(("failure", "status", "outcome", "reason"), FAILURES)
def test_a_step_that_the_policy_made_fail_ends_the_episode_and_keeps_its_turn(faulty, failure, status, outcome, reason):
    trajectory = played("done.", make_env=faulty(failure), step_timeout_s=0.02)
    assert (trajectory.status, trajectory.outcome) == (status, outcome)
    assert reason in trajectory.extra["reason"]
    assert [(turn.start, turn.end, turn.reward) for turn in trajectory.turns] == [(5, 10, 0.0)]
    assert trajectory.loss_mask.sum() == 5


@pytest.mark.parametrize(("failure", "status", "outcome", "reason"), FAILURES)
def test_a_failure_that_the_recipe_calls_a_fault_is_tried_again_and_never_scored(
    faulty, failure, status, outcome, reason
):
    make_env = faulty(failure, failure)
    trajectory = played(
        "done.", "done.", make_env=make_env, step_timeout_s=0.02, env_retries=1, faults=frozenset({outcome})
    )
    assert (trajectory.status, trajectory.outcome) == ("env-fault", "")
    assert reason in trajectory.extra["fault"]
    assert len(make_env.envs) == 2


def test_too_many_turns_are_a_fault_if_the_recipe_sets_that():
    assert played("a", "b", max_turns=2).outcome == "max-turns"
    trajectory = played("a", "b", max_turns=2, env_retries=0, faults=frozenset({"max-turns"}))
    assert (trajectory.status, trajectory.outcome) == ("env-fault", "")


def test_an_episode_that_ends_before_its_first_turn_is_neither_a_fault_nor_data():
    class Lost(WordEnv):
        async def reset(self, seed):
            return Step(observation="lost", done=True)

    trajectory = played(make_env=Lost)
    assert (trajectory.status, trajectory.outcome, trajectory.extra) == ("aborted-redundant", "unplayed", {})


def test_the_time_of_an_episode_that_was_played_is_the_policys():
    class Slow(WordEnv):
        async def step(self, action):
            await asyncio.sleep(40.0)
            return await super().step(action)

    trajectory = run_virtual(run(ScriptedPolicy("a", "b", "c", "d"), make_env=Slow, episode_timeout_s=100.0))
    assert (trajectory.status, trajectory.outcome, len(trajectory.turns)) == ("truncated", "timeout", 3)
    assert "episode_timeout_s = 100 s" in trajectory.extra["reason"]


def test_an_episode_that_waited_for_engines_most_of_the_time_is_a_fault_of_theirs():
    class Overloaded(ScriptedPolicy):
        async def generate(self, request):
            await asyncio.sleep(40.0)
            return await super().generate(request)

    trajectory = run_virtual(run(Overloaded("a", "b", "c", "d"), make_env=WordEnv, episode_timeout_s=100.0))
    assert (trajectory.status, trajectory.reward) == ("policy-fault", None)
    assert "100 s were spent waiting for engines" in trajectory.extra["fault"]


def test_an_environment_that_ignores_being_cancelled_is_left_behind(faulty):
    async def play():
        trajectory = await run(ScriptedPolicy("done.", "done."), make_env=make_env, step_timeout_s=0.02)
        make_env.release.set()
        return trajectory

    make_env = faulty("step ignores being cancelled")
    assert asyncio.run(play()).outcome == "timeout"


def test_an_environment_that_cannot_be_made_is_a_fault():
    def broken():
        raise OSError("no space left")

    trajectory = played(make_env=broken, env_retries=0)
    assert trajectory.status == "env-fault"
    assert "no space left" in trajectory.extra["fault"]


def test_an_environment_that_cannot_be_closed_does_not_spoil_the_episode():
    class Stuck(WordEnv):
        async def close(self):
            raise OSError("busy")

    assert played("done.", make_env=Stuck).status == "done"


def test_a_plain_environment_that_hangs_is_abandoned():
    hang = threading.Event()

    class Plain:
        def reset(self, seed):
            return "s"

        def step(self, action):
            hang.wait()
            return Step(observation="", done=True)

        def close(self):
            hang.set()

    trajectory = played("a", make_env=lambda: adapt_env(Plain()), step_timeout_s=0.02, env_retries=0)
    assert trajectory.outcome == "timeout"
    assert hang.is_set()


def test_cancelling_closes_the_environment_and_leaves_the_engine():
    async def cancelled():
        env, policy = WordEnv(), ScriptedPolicy(None)
        task = asyncio.create_task(run(policy, make_env=lambda: env))
        await policy.asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return env, policy

    env, policy = asyncio.run(cancelled())
    assert env.closed
    assert policy.left == [policy.requests[0].request_id]


def test_cancelling_while_the_environment_works_closes_it():
    async def cancelled():
        env = Faulty()
        env.fault = "step hangs"
        policy = ScriptedPolicy("a")
        task = asyncio.create_task(run(policy, make_env=lambda: env))
        await policy.asked.wait()
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return env

    assert asyncio.run(cancelled()).closed


def test_pauses_double_are_spread_and_stay_bounded():
    pauses = [retry_pause_s(1.0, attempt=attempt, episode="lake/0/0") for attempt in range(1, 2000)]
    assert all(0.5 * 2**i <= pause < 1.5 * 2**i for i, pause in enumerate(pauses[:5]))
    assert max(pauses) <= 90
    assert retry_pause_s(1.0, attempt=1, episode="lake/0/1") != pauses[0]


def test_the_real_chat_layout_fits(tiny_model_dir):
    from hpcrl.models.chat_layout import load_chat_layout

    chat = load_chat_layout(tiny_model_dir)
    (letter,) = chat.template.encode_text("x")
    word = make_completion([letter], version=5, finish_reason="length")
    trajectory = played(word, word, max_turns=2, layout=chat)
    assert trajectory.status == "truncated"
    assert [trajectory.token_ids[turn.start] for turn in trajectory.turns] == [letter, letter]
    assert list(trajectory.token_ids) == [
        *chat.first_turn("s11"),
        letter,
        *chat.next_turn("x", generated=[letter]),
        letter,
    ]


def test_an_episode_over_its_whole_time_is_a_fault_and_is_not_tried_again():
    attempts = []

    class Slow(WordEnv):
        async def reset(self, seed):
            attempts.append(self)
            await asyncio.sleep(0.05)
            raise ValueError("again")

    trajectory = played(make_env=Slow, episode_timeout_s=0.12, env_retries=1000)
    assert trajectory.status == "env-fault"
    assert "no end in episode_timeout_s = 0.12 s" in trajectory.extra["fault"]
    assert all(env.closed for env in attempts)


def test_making_an_environment_has_its_own_deadline():
    async def never():
        await asyncio.Event().wait()

    async def tried():
        return await run_episode(
            TASK,
            index=0,
            make_env=never,
            layout=Letters(),
            policy=ScriptedPolicy(),
            limits=EpisodeLimits(
                max_turns=1, max_new_tokens=1, context_length=9, max_lag=1, env_retries=0, create_timeout_s=0.02
            ),
            newest_version=lambda: 0,
            producer="000-env-0",
        )

    assert asyncio.run(tried()).extra["fault"] == "making the environment: no answer in 0.02 s"


def test_a_task_may_start_with_messages(tiny_model_dir):
    from hpcrl.models.chat_layout import load_chat_layout

    messages = [{"role": "system", "content": "Hm."}, {"role": "user", "content": "go"}]

    class Briefed(WordEnv):
        async def reset(self, seed):
            return TaskPrompt(messages=messages)

    chat = load_chat_layout(tiny_model_dir)
    (letter,) = chat.template.encode_text("x")
    word = make_completion([letter], version=5, finish_reason="length")
    trajectory = played(word, make_env=Briefed, max_turns=1, layout=chat)
    assert chat.template.decode_all(trajectory.token_ids.tolist()) == "<user>Hm.<user>go<agent>x"
