"""Campaigns in simulated time: reproducible, in agreement with the simulated engine, with the policies of real ones."""

import asyncio
import json
import os
from pathlib import Path

import msgspec
import pytest

from hpcrl.campaign.request import load_request
from hpcrl.campaign_dir.event_log import EventLog
from hpcrl.campaign_dir.events import EpisodesCounted
from hpcrl.engines.base import GenerateRequest
from hpcrl.engines.sim.engine import SimEngine, SimSettings
from hpcrl.engines.version_gate import MAX_VERSION_WAIT_S
from hpcrl.errors import ConfigError
from hpcrl.hardware.cost_model import estimate_speed, read_model_shape
from hpcrl.hardware.gpus import GPU_CATALOGUE
from hpcrl.hardware.model_catalogue import MODEL_CONFIGS
from hpcrl.simulation.__main__ import main
from hpcrl.simulation.campaign import SimulatedCampaign, SimulationSettings, simulate_campaign
from hpcrl.simulation.clock import EventQueue
from hpcrl.simulation.engine import EngineRow, FluidEngine
from hpcrl.simulation.recorded import read_campaign_traces, weigh_by_cuts
from hpcrl.simulation.simulated_worker import FaultSettings
from hpcrl.simulation.sizes import find_sizes
from hpcrl.simulation.timeline import draw_timeline
from hpcrl.simulation.workload import (
    DrawnEpisodes,
    EpisodeScript,
    LatencySettings,
    RecordedEpisodes,
    TurnScript,
    fit_episodes,
    read_traces,
)
from hpcrl.spool.record import EpisodeTurn
from hpcrl.testing.virtual_time import run_virtual
from tests.support.campaign_spools import Spools
from tests.support.printed_json import load_checked
from tests.support.trajectories import make_trajectory

GOLDEN = Path(__file__).parent / "quickstart.json"
SPEED = estimate_speed(GPU_CATALOGUE["h100"], shape=read_model_shape(MODEL_CONFIGS["Qwen/Qwen3-8B"]))
SLOW_EPISODES = [EpisodeScript(0.0, (TurnScript(20, 20, env_s),)) for env_s in (60.0, 90.0, 120.0)]
TRACES = "session,t_s,prompt_tokens,reply_tokens\n0,0,100,20\n0,1.5,200,10\n1,0,50,300\n"


def simulate(*settings: str, source=None, **changed):
    request = load_request("quickstart", site="local", settings=settings)
    wanted = {"num_steps": 8, "train_s": 2.0, **changed}
    drawn = DrawnEpisodes(request.recipe, LatencySettings(), seed=wanted.get("seed", 0))
    return simulate_campaign(request, find_sizes(request), source or drawn, SimulationSettings(**wanted))


# ---- the engine


def play_fluid(turns):
    """Return the end of each (start, prompt, reply) on the fluid engine."""
    queue, ends = EventQueue(), {}
    engine = FluidEngine(queue, SPEED, max_batch=16)
    for number, (start, num_prompt, num_new) in enumerate(turns):
        row = EngineRow(
            str(number),
            num_prompt=num_prompt,
            num_new=num_new,
            on_end=lambda row: ends.setdefault(int(row.trajectory), queue.now),
        )
        queue.call_at(start, lambda row=row: engine.submit(row))
    assert queue.run(is_done=lambda: len(ends) == len(turns))
    return [ends[number] for number in range(len(turns))], engine


def play_steps(turns):
    """Return the same on the simulated engine, which makes every step."""

    async def play():
        async with SimEngine(SPEED, settings=SimSettings(max_batch=16)) as engine:
            loop = asyncio.get_running_loop()

            async def ask(number, start, num_prompt, num_new):
                await asyncio.sleep(start)
                await engine.generate(
                    GenerateRequest(
                        request_id=str(number),
                        token_ids=list(range(num_prompt)),
                        max_new_tokens=num_new,
                        trajectory=str(number),
                    )
                )
                return loop.time()

            return await asyncio.gather(*(ask(number, *turn) for number, turn in enumerate(turns)))

    return run_virtual(play())


@pytest.mark.parametrize(
    "turns",
    [
        [(0.0, 500, 200)],
        [(0.0, 6000, 50), (0.1, 300, 400)],
        [(0.05 * number, 200 + 700 * (number % 5), 20 + 60 * (number % 7)) for number in range(40)],
    ],
)
def test_the_fluid_engine_ends_requests_when_the_simulated_engine_does(turns):
    fluid, engine = play_fluid(turns)
    assert fluid == pytest.approx(play_steps(turns), rel=2e-3)
    assert engine.num_generated == pytest.approx(sum(num_new for _, _, num_new in turns), rel=1e-3)
    assert len(engine) == 0


def test_kv_that_is_kept_between_turns_is_not_computed_again():
    queue, ends = EventQueue(), []
    engine = FluidEngine(queue, SPEED, max_batch=4)
    first = EngineRow("a", num_prompt=4000, num_new=10, on_end=lambda _: ends.append(queue.now))
    engine.submit(first)
    queue.run(is_done=lambda: bool(ends))
    before = engine.num_prefilled
    engine.submit(EngineRow("a", num_prompt=4110, num_new=10, on_end=lambda _: ends.append(queue.now)))
    queue.run(is_done=lambda: len(ends) == 2)
    assert engine.num_prefilled - before == pytest.approx(99, abs=2)
    assert ends[1] - ends[0] < ends[0]


def test_new_weights_have_running_requests_computed_again_after_the_pause():
    queue, ends = EventQueue(), []
    engine = FluidEngine(queue, SPEED, max_batch=4)
    engine.submit(
        EngineRow("a", num_prompt=1000, num_new=200, on_end=lambda row: ends.append((queue.now, row.version)))
    )
    alone, _ = play_fluid([(0.0, 1000, 200)])
    queue.call_at(0.5, lambda: engine.load(3, stall_s=2.0))
    queue.run(is_done=lambda: bool(ends))
    assert ends[0][0] > alone[0] + 2.0
    assert ends[0][1] == 0
    assert engine.version == 3


def submit_later(queue, engine, start, name, num_new, ends):
    row = EngineRow(
        name, num_prompt=1, num_new=num_new, on_end=lambda row: ends.append((row.trajectory, row.version, queue.now))
    )
    queue.call_at(start, lambda: engine.submit(row))
    return row


def test_a_request_joins_the_batch_at_the_end_of_a_step():
    queue, ends = EventQueue(), []
    engine = FluidEngine(queue, SPEED, max_batch=4)
    step_s = SPEED.decode_s(1, num_kv=1)
    submit_later(queue, engine, 0.0, "a", 3, ends)
    submit_later(queue, engine, 0.25 * step_s, "b", 1, ends)
    queue.run(is_done=lambda: len(ends) == 2)
    assert [name for name, _, _ in ends] == ["b", "a"]
    assert [time / step_s for _, _, time in ends] == pytest.approx([2.0, 3.0], abs=0.05)


def test_new_weights_wait_for_the_end_of_a_step_and_requests_for_the_weights():
    queue, ends = EventQueue(), []
    engine = FluidEngine(queue, SPEED, max_batch=4)
    step_s = SPEED.decode_s(1, num_kv=1)
    submit_later(queue, engine, 0.0, "a", 5, ends)
    queue.call_at(0.25 * step_s, lambda: engine.load(1, stall_s=1.0))
    submit_later(queue, engine, 0.5 * step_s, "b", 1, ends)
    queue.call_at(0.9, lambda: ends.append(("still", engine.version, queue.now)))
    queue.run(is_done=lambda: len(ends) == 3)
    assert [(name, version) for name, version, _ in ends] == [("still", 0), ("b", 1), ("a", 0)]
    assert ends[1][2] == pytest.approx(1.0 + 2 * step_s, rel=0.01)


def test_a_request_waits_for_its_version_for_a_while():
    queue, ends = EventQueue(), []
    engine = FluidEngine(queue, SPEED, max_batch=4)
    rows = [
        EngineRow(name, num_prompt=9, num_new=3, on_end=lambda row: ends.append((row, queue.now)), min_version=needed)
        for name, needed in (("any", 0), ("next", 1), ("gone", 1), ("never", 7))
    ]
    for row in rows:
        engine.submit(row)
    assert engine.figures().num_waiting == 4
    engine.abort(rows[2])
    queue.call_at(5.0, lambda: engine.load(1, stall_s=1.0))
    queue.run(is_done=lambda: len(ends) == 3)
    assert [(row.trajectory, row.version) for row, _ in ends] == [("any", 0), ("next", 1), ("never", 1)]
    any_at, next_at, never_at = (at for _, at in ends)
    assert any_at < 5.0 < 6.0 < next_at < never_at
    assert never_at > MAX_VERSION_WAIT_S


def test_a_request_has_the_version_of_its_first_token():
    queue, ends = EventQueue(), []
    engine = FluidEngine(queue, SPEED, max_batch=4)
    for name, num_prompt in (("decodes", 1), ("prefills", 100)):
        row = EngineRow(name, num_prompt=num_prompt, num_new=5, on_end=ends.append)
        engine.submit(row)
    queue.call_at(SPEED.decode_s(1, num_kv=1) / 2, lambda: engine.load(1, stall_s=0.0))
    queue.run(is_done=lambda: len(ends) == 2)
    assert {row.trajectory: row.version for row in ends} == {"decodes": 0, "prefills": 1}


def test_a_request_that_is_aborted_makes_room_at_the_end_of_the_step():
    queue, ends = EventQueue(), []
    engine = FluidEngine(queue, SPEED, max_batch=1)
    step_s = SPEED.decode_s(1, num_kv=1)
    row = submit_later(queue, engine, 0.0, "a", 100, ends)
    submit_later(queue, engine, 0.5 * step_s, "b", 1, ends)
    queue.call_at(2.5 * step_s, lambda: ends.append(("aborted", 0, engine.abort(row))))
    queue.run(is_done=lambda: len(ends) == 2)
    assert ends[0] == ("aborted", 0, 2)
    assert ends[1][2] == pytest.approx(4 * step_s, rel=0.01)


def test_an_engine_reports_the_same_load_for_a_while():
    queue = EventQueue()
    engine = FluidEngine(queue, SPEED, max_batch=4)
    engine.figures()
    engine.load(1, stall_s=0.0)
    versions = []
    for time in (0.2, 0.3):
        queue.call_at(time, lambda: versions.append(engine.figures().version))
    queue.run(is_done=lambda: len(versions) == 2)
    assert versions == [0, 1]


def test_an_engine_that_fails_returns_its_requests():
    queue = EventQueue()
    engine = FluidEngine(queue, SPEED, max_batch=1)
    rows = [EngineRow(str(number), num_prompt=10, num_new=10, on_end=lambda _: None) for number in range(3)]
    for row in rows:
        engine.submit(row)
    assert sorted(engine.fail(), key=rows.index) == rows
    assert not queue.run(is_done=lambda: False)
    assert len(engine) == 0


# ---- campaigns


def test_a_seed_gives_the_same_simulation_and_another_seed_another():
    first, again, other = simulate(), simulate(), simulate(seed=1)
    assert first == again
    assert first.steps != other.steps


def test_a_simulation_is_as_recorded():
    made = json.loads(msgspec.json.encode(simulate()))
    del made["timeline"]
    if os.environ.get("HPCRL_UPDATE_GOLDEN"):
        GOLDEN.write_text(json.dumps(made, indent=2) + "\n")
    assert made == json.loads(GOLDEN.read_text())


def test_no_trained_episode_is_staler_than_the_recipe_allows():
    result = simulate("rollout.max_lag=1", train_s=30.0)
    assert set(result.lags) <= {"0", "1"}
    assert result.num_episodes == result.num_steps * 64


def test_training_that_does_not_wait_for_old_episodes_has_them_cut():
    waiting, cutting = simulate(num_steps=20), simulate(num_steps=20, waits_for_old=False)
    assert cutting.waste.get("stale", 0) > waiting.waste.get("stale", 0)
    assert cutting.step_s < waiting.step_s


def test_sync_mode_trains_on_the_newest_weights_and_takes_longer():
    one, other = simulate("rollout.mode=sync", train_s=5.0), simulate(train_s=5.0)
    assert set(one.lags) == {"0"}
    assert one.step_s > other.step_s


def test_of_several_env_workers_the_first_to_finish_starts_no_episode_that_would_be_too_old():
    result = simulate("rollout.mode=sync", "resources.env.num_workers=4", "train.groups_per_step=16")
    assert set(result.lags) == {"0"}, "a batch has only episodes of the newest weights"
    assert sum(result.waste.values()) == 0


def test_no_env_worker_plays_what_the_others_still_play_however_long_that_takes():
    result = simulate("resources.env.num_workers=4", "rollout.max_running=256", source=RecordedEpisodes(SLOW_EPISODES))
    assert result.waste == {}


def test_a_campaign_of_simulated_engines_is_as_slow_as_they_are():
    one, other = (simulate("engine.backend=sim", f"engine.sim.speed={speed}", train_s=0.01) for speed in (1.0, 0.1))
    assert other.utilisation["decode"] == pytest.approx(10 * one.utilisation["decode"], rel=0.1)


def test_a_slow_trainer_is_busy_and_a_fast_one_waits():
    slow, fast = simulate(train_s=60.0), simulate(train_s=0.01)
    assert slow.utilisation["train"] > 0.95
    assert slow.step_s == pytest.approx(60, rel=0.05)
    assert fast.utilisation["train"] < 0.1


def test_jobs_follow_each_other_at_their_walltime():
    result = simulate("job.walltime_min=2", "job.drain_s=10", "job.num_jobs=20", train_s=20.0)
    assert result.is_complete
    assert result.num_jobs > 1
    assert result.waste["end of a job"] > 0


def test_a_chain_that_is_too_short_is_reported():
    result = simulate("job.walltime_min=2", "job.drain_s=10", train_s=20.0, num_steps=50)
    assert not result.is_complete
    assert 0 < result.num_steps < 50


def test_faults_of_environments_and_engines_slow_a_campaign_down_but_do_not_end_it():
    result = simulate(faults=FaultSettings(env_share=0.4, engine_hours=0.005, repair_s=5.0), num_steps=20)
    assert result.is_complete
    assert result.num_failures > 0
    assert result.step_s > simulate(num_steps=20).step_s


def test_engines_fail_from_the_first_episode_on():
    result = simulate(faults=FaultSettings(engine_hours=1e-3, repair_s=20.0), num_steps=2)
    assert result.num_failures > 0
    assert result.seconds > simulate(num_steps=2).seconds + 10


def test_each_step_ends_before_the_walltime():
    """A job of 9 min has time for two steps of 200 s and a checkpoint."""
    settings = ("job.walltime_min=10", "job.num_jobs=9", "job.drain_s=60")
    result = simulate(*settings, num_steps=6, train_s=200.0)
    assert result.is_complete
    assert result.num_jobs == 3


def test_a_step_that_would_end_after_the_walltime_is_made_in_the_next_job():
    """The first episodes take 1 to 2 min; the first step would end 30 s after the walltime."""
    settings = ("job.walltime_min=10", "job.num_jobs=9", "job.drain_s=60")
    source = RecordedEpisodes(SLOW_EPISODES, 0)
    result = simulate(*settings, num_steps=1, train_s=450.0, source=source)
    assert (result.num_jobs, result.num_steps, result.num_episodes) == (2, 1, 64)
    assert result.seconds == pytest.approx(480 + 20 + 60 + 450, abs=5)


def test_a_campaign_drains_as_early_as_its_steps_need():
    """After a step of 200 s, 1.3 x (200 + 20) s are kept: so late starts no step, and none is abandoned."""
    settings = ("job.walltime_min=20", "job.num_jobs=9", "job.drain_s=10")
    short, learned = (simulate(*settings, num_steps=6, train_s=train_s) for train_s in (2.0, 200.0))
    assert short.num_jobs == 1
    assert learned.num_jobs == 2


@pytest.mark.parametrize("train_s", [521.0, 3000.0])
def test_a_step_that_no_job_has_time_for_is_refused(train_s):
    settings = ("job.walltime_min=10", "job.num_jobs=9", "job.drain_s=60")
    with pytest.raises(ConfigError, match=r"a training step takes .* min, and a job has 9 min for it and a checkpoint"):
        simulate(*settings, num_steps=6, train_s=train_s)
    assert simulate(*settings, num_steps=2, train_s=500.0).is_complete


def test_turns_that_find_no_room_wait_for_it_without_asking_again_and_again():
    """One A100 has room for the KV of a part of 512 conversations; each of the others would ask twice a second."""
    settings = ("site.account=m1", "resources.decode.num_workers=1", "resources.prefill.num_workers=0")
    settings += ("rollout.max_running=512", "train.groups_per_step=16", "engine.max_model_len=32768")
    settings += tuple(f"domains.math.{name}=3000" for name in ("usual_prompt_tokens", "usual_reply_tokens"))
    request = load_request("qwen3-8b-math", site="perlmutter", settings=settings)
    source = DrawnEpisodes(request.recipe, LatencySettings())
    campaign = SimulatedCampaign(request, find_sizes(request), source, SimulationSettings(num_steps=2))
    campaign.run()
    assert sum(worker.router.reasons["no room for KV"] for worker in campaign.env_workers) > 100
    assert campaign.queue.num_run < 20_000


def test_a_job_that_ends_before_its_first_step_names_the_settings(capsys):
    words = ["quickstart", "--site", "local", "-s", "train.groups_per_step=3000", "-s", "job.walltime_min=2"]
    assert main([*words, "-s", "job.drain_s=10"]) == 1
    printed = capsys.readouterr().out
    assert "steps        0 in " in printed
    assert "raise job.walltime_min or job.num_jobs, or lower train.groups_per_step" in printed
    assert "staleness" not in printed
    assert "100.0% end of a job" in printed
    assert "redundant" not in printed


def test_the_trainer_is_busy_in_its_only_step():
    assert simulate(num_steps=1, train_s=1000.0).utilisation["train"] > 0.95


def test_drawn_episodes_that_fill_the_context_are_named(capsys):
    assert main(["quickstart", "--site", "local", "--steps", "2"]) == 0
    assert "of the episodes end early, since they fill the context of 512 tokens" in capsys.readouterr().out
    fitting = ["-s", "domains.lake.usual_prompt_tokens=6", "-s", "domains.lake.usual_reply_tokens=6"]
    assert main(["quickstart", "--site", "local", "--steps", "2", *fitting]) == 0
    assert "end early" not in capsys.readouterr().out


def test_a_table_of_calls_may_have_resets(tmp_path, capsys):
    path = tmp_path / "calls.csv"
    path.write_text(TRACES)
    seconds = []
    for words in ([], ["--reset-s", "30"]):
        assert main(["quickstart", "--site", "local", "--steps", "2", "--traces", str(path), *words, "--json"]) == 0
        seconds.append(load_checked(capsys.readouterr().out, "simulate")["seconds"])
    assert seconds[1] > seconds[0] + 25


def test_redundant_episodes_are_waste():
    result = simulate("rollout.redundancy=4", "rollout.late_after_s=0")
    assert result.waste["redundant"] > 0.05


def test_a_slow_reward_delays_steps():
    assert simulate(reward_s=30.0).seconds > simulate().seconds + 20


@pytest.mark.parametrize("site", ["local", "workstation", "lab", "lab-hetstep"])
def test_a_simulation_has_the_nodes_of_the_plan(site):
    """Roles of one component share its nodes, with and without GPUs."""
    request = load_request("quickstart", site=site)
    assert find_sizes(request).num_nodes == sum(component.nodes for component in request.plan.components)


@pytest.mark.parametrize("settings", [(), ("resources.train.num_workers=16",)])
def test_nodes_with_gpus_are_charged_that_only_env_workers_use(settings):
    request = load_request("qwen3-32b", site="jupiter", settings=("site.account=m1", *settings))
    source = DrawnEpisodes(request.recipe, LatencySettings(), seed=0)
    result = simulate_campaign(request, find_sizes(request), source, SimulationSettings(num_steps=1))
    assert (result.num_nodes, result.num_gpus) == (request.plan.num_nodes, request.plan.num_gpus)
    assert result.gpu_hours == pytest.approx(request.plan.num_gpus * result.seconds / 3600, abs=1e-3)
    assert result.node_hours == pytest.approx(request.plan.num_nodes * result.seconds / 3600, abs=1e-3)


def test_a_model_that_does_not_fit_is_refused():
    request = load_request("quickstart", site="local")
    sizes = find_sizes(request)
    large = msgspec.structs.replace(sizes.shape, num_dense=10**12)
    with pytest.raises(ConfigError, match="does not fit into 1 h100"):
        type(sizes)(**{**vars(sizes), "shape": large}).find_speed(sizes.decode, request.recipe)


def test_weights_of_8_bits_make_engines_faster():
    settings = ("site.account=x", "engine.backend=vllm")
    steps = []
    for quantization in ("none", "fp8"):
        chosen = (*settings, f"engine.quantization={quantization}")
        request = load_request("qwen3-8b-math", site="perlmutter", settings=chosen)
        source = DrawnEpisodes(request.recipe, LatencySettings(), seed=0)
        steps.append(simulate_campaign(request, find_sizes(request), source, SimulationSettings(num_steps=2)))
    assert steps[1].seconds < steps[0].seconds


def simulate_training(*settings, **changed):
    """Return the time of the training steps of 8B on 16 A100, on four nodes."""
    request = load_request("qwen3-8b-math", site="perlmutter", settings=("site.account=x", *settings))
    source = DrawnEpisodes(request.recipe, LatencySettings(), seed=0)
    return simulate_campaign(request, find_sizes(request), source, SimulationSettings(num_steps=2, **changed)).train_s


def test_training_takes_longer_over_a_slow_network():
    small = "train.tokens_per_micro_batch=2048"  # for each of which the weights are gathered
    fast, slow = (simulate_training(small, f"site.network.gbit_per_gpu={gbit}") for gbit in (10_000, 10))
    assert slow > 2 * fast
    assert simulate_training("site.network.gbit_per_gpu=1", train_s=3.0) == 3.0, "the given time has all in it"


@pytest.mark.parametrize(
    ("settings", "links"),
    [
        ((), "at 300 GB/s within a node, and at 25 GB/s each to other nodes (site.network.gbit_per_gpu)"),
        (("site.network.gbit_per_gpu=100",), "at 300 GB/s within a node, and at 12.5 GB/s each to other nodes"),
        (("resources.train.num_workers=4",), "at 300 GB/s within a node"),
    ],
)
def test_the_links_of_ranks_are_printed_as_an_assumption(capsys, settings, links):
    chosen = [word for setting in ("site.account=x", *settings) for word in ("-s", setting)]
    main(["qwen3-8b-math", "--site", "perlmutter", "--steps", "1", *chosen])
    assert f"ranks send each other all of it {links}" in capsys.readouterr().out


def test_ranks_without_gpus_and_a_given_time_need_no_links(capsys):
    main(["quickstart", "--site", "local", "--steps", "1", "-s", "resources.train.num_workers=2"])
    main(["qwen3-8b-math", "--site", "perlmutter", "--steps", "1", "--train-s", "3", "-s", "site.account=x"])
    assert "ranks send" not in capsys.readouterr().out


# ---- what passes between the roles


def make_simulation(*settings, **changed):
    request = load_request("quickstart", site="local", settings=settings)
    source = DrawnEpisodes(request.recipe, LatencySettings(env_s=0.1, reset_s=0.1))
    return SimulatedCampaign(request, find_sizes(request), source, SimulationSettings(**{"train_s": 0.1, **changed}))


def record_calls(owner, name, calls, queue):
    """Note the times of the calls of a method, with its arguments."""
    method = getattr(owner, name)

    def record(*given):
        calls.append((queue.now, *given))
        return method(*given)

    setattr(owner, name, record)


def test_a_batch_waits_until_the_engines_have_loaded_the_last_version():
    one, other = (simulate("rollout.mode=sync", load_s=load_s) for load_s in (0.0, 3.0))
    assert other.step_s - one.step_s == pytest.approx(3.0, abs=0.5)


def test_episodes_wait_for_the_version_that_keeps_them_fresh():
    settings = ("rollout.max_lag=1", "rollout.max_running=256")
    one, other = (simulate(*settings, load_s=load_s, train_s=0.1) for load_s in (0.0, 3.0))
    assert "too old for training" not in one.waste | other.waste


def test_requests_and_answers_are_on_the_way_for_a_time_in_each_turn():
    source = RecordedEpisodes([EpisodeScript(0.1, (TurnScript(10, 1, 0.1),) * 6)])
    one, other = (simulate("rollout.mode=sync", source=source, request_s=request_s) for request_s in (0.0, 1.0))
    assert other.step_s - one.step_s == pytest.approx(6.0, abs=0.3)


def test_an_env_worker_starts_one_episode_after_the_other():
    one, other = (simulate("rollout.mode=sync", episode_start_s=start_s) for start_s in (0.0, 0.1))
    assert other.step_s - one.step_s > 3.0, "64 episodes take 6.4 s to start, while the first ones run"


def test_an_episode_that_starts_late_plays_a_turn_before_it_is_found_too_old():
    campaign = make_simulation()
    worker = campaign.env_workers[0]
    campaign._play()
    campaign.queue.run(is_done=lambda: bool(worker.runs))
    campaign.trainer.version = 10
    campaign.queue.run(is_done=lambda: worker.groups.endings["aborted-stale"] > 0)
    assert worker.router.reasons.total() > 0


def test_full_groups_become_durable_together_once_they_are_old_or_complete_a_batch():
    campaign, seals = make_simulation("spool.seal_after_s=4", "train.groups_per_step=8"), []
    record_calls(campaign.links, "seal", seals, campaign.queue)
    campaign.run()
    sizes = [len(members) for _, _, members in seals]
    assert max(sizes) > 8
    assert sum(sizes) >= 64 * len(campaign.trainer.steps)


def test_groups_start_as_soon_as_others_are_durable():
    campaign, durable, starts = make_simulation("rollout.mode=one-step-off", handover_s=0.0, load_s=0.0), [], []
    worker = campaign.env_workers[0]
    record_calls(worker, "record_durable", durable, campaign.queue)
    record_calls(worker, "_start_group", starts, campaign.queue)
    campaign.num_steps = 3
    campaign.run()
    times = [{time for time, *_ in calls} for calls in (durable, starts)]
    assert set.intersection(*times)


def test_a_hold_ends_when_what_it_is_for_has_become_durable():
    campaign = make_simulation("rollout.max_lag=0")
    worker, member = campaign.env_workers[0], make_trajectory("lake/0/0", reward=1.0)
    worker.in_flight.start(member.id, version=0)
    worker.in_flight.mark_leaving(member.id)
    worker._write_hold()
    assert worker.hold is not None
    worker.record_durable([member])
    assert worker.hold is None


def test_slow_rewards_make_no_episode_too_old():
    assert simulate("rollout.max_lag=1", reward_s=5.0, num_steps=20).waste == {}


def test_a_trainer_drops_what_is_too_old_before_it_has_a_batch():
    campaign, dropped = make_simulation("rollout.max_lag=0"), []
    record_calls(campaign.trainer, "drop", dropped, campaign.queue)
    old = [make_trajectory(f"lake/0/{index}", reward=1.0) for index in range(8)]
    campaign.trainer.offer(old)
    assert not dropped
    campaign.trainer.version = 1
    campaign.trainer.try_step()
    assert [members for _, members in dropped] == [old]
    campaign.trainer.offer(old)
    assert len(dropped) == 2


# ---- traces and the command


@pytest.mark.parametrize(
    ("lengths", "cuts", "weights"),
    [
        ([1, 2, 3], {}, [1, 1, 1]),
        ([1, 2, 3], {1.5: 1}, [1, 1.5, 1.5]),
        ([3, 2], {2.0: 1}, [2, 1]),
        ([1, 2], {5.0: 3}, [1, 1]),
        ([4, 1, 4], {1.0: 2, 3.0: 2}, [3, 1, 3]),
    ],
)
def test_an_episode_stands_for_those_that_were_cut_off_before_its_length(lengths, cuts, weights):
    assert weigh_by_cuts(lengths, cuts) == pytest.approx(weights)


def test_episodes_are_drawn_by_their_weights():
    first, second = EpisodeScript(0.0, ()), EpisodeScript(1.0, ())
    source = RecordedEpisodes([first, second], weights=[1.0, 3.0])
    drawn = [source.draw("lake", seed=str(number)) for number in range(400)]
    assert drawn.count(second) == pytest.approx(300, abs=30)


def test_the_episodes_of_a_campaign_make_up_for_those_that_were_cut_off(home):
    spools = Spools(home / "campaigns" / "cut")
    turns = [[4], [4, 8]]
    spools.scored(
        *(
            make_trajectory(
                f"lake/0/{index}", ends[-1], reward=1.0, turns=[EpisodeTurn(start=end - 4, end=end) for end in ends]
            )
            for index, ends in enumerate(turns)
        )
    )
    log = EventLog.open(spools.campaign, "env", 0, job=0, role="env")
    finished, cut = {"4+": 1, "4+tokens": 4, "8+": 1, "8+tokens": 8}, {"4+": 2, "4+tokens": 8}
    log.emit(EpisodesCounted(done=2, aborted_redundant=2, lengths={"done": finished, "aborted-redundant": cut}))
    log.close()
    source = read_campaign_traces("cut")
    drawn = [len(source.draw("lake", seed=str(number)).turns) for number in range(400)]
    assert drawn.count(2) == pytest.approx(300, abs=30)


def test_rows_that_repeat_others_count_once(tmp_path, capsys):
    path = tmp_path / "calls.csv"
    header, *rows = TRACES.splitlines(keepends=True)
    path.write_text(TRACES)
    episodes = read_traces(path)
    path.write_text("".join([header, *rows, *rows]))
    assert read_traces(path) == episodes
    assert "3 of 6 rows repeat an earlier one (line 5 is line 2), and count once" in capsys.readouterr().err


def test_times_may_count_from_1970(tmp_path):
    path = tmp_path / "calls.csv"
    header, *rows = TRACES.splitlines(keepends=True)
    shifted = [row.split(",") for row in rows]
    for row in shifted:
        row[1] = str(float(row[1]) + 1732900000)
    path.write_text(header + "".join(map(",".join, shifted)))
    assert len(read_traces(path)) == 2


def test_recorded_calls_become_turns(tmp_path):
    path = tmp_path / "calls.csv"
    path.write_text(TRACES)
    first, second = read_traces(path)
    assert [(turn.num_fresh, turn.num_reply) for turn in first.turns] == [(100, 20), (80, 10)]
    assert first.turns[0].env_s == pytest.approx(1.3)
    assert len(second.turns) == 1
    result = simulate(source=RecordedEpisodes([first, second]))
    assert result.is_complete


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("", "has no column session or episode, t_s, prompt_tokens or input_chars"),
        ('{"session": 1, "t_s": 0}\n', "seems to be JSON: give CSV"),
        ("session;t_s;prompt_tokens;reply_tokens\n", "has its columns not separated by commas"),
        ("session,t_s\n0,0\n", "has no column prompt_tokens or input_chars, reply_tokens or output_chars"),
        ("session,t_s,prompt_tokens,reply_tokens\n", "has no rows below its header"),
        (TRACES + ",1,10,10\n", "line 5: session is empty: name the session of the call"),
        (TRACES + "2,-1,10,10\n", "line 5: t_s = '-1': give a number, 0 or more"),
        (TRACES + "2,0,ten,10\n", "line 5: prompt_tokens = 'ten': give a number"),
        (TRACES + "2,0\n", "line 5: prompt_tokens = None: give a number"),
        (TRACES + "2,0,1e9,10\n", "line 5: prompt_tokens = '1e9': give a number below 1e+09"),
        (TRACES + "2,0,5,100,10\n", "line 5: it has more values than the header has columns"),
        ("session,session,t_s,prompt_tokens,reply_tokens\n0,0,0,1,1\n", "has two columns 'session'"),
        ("session,t_s,prompt_tokens,reply_tokens\n0,0,9999,1\n", "no episode starts with a prompt of less than"),
    ],
)
def test_traces_that_cannot_be_are_refused_with_the_place(tmp_path, capsys, text, refusal):
    path = tmp_path / "calls.csv"
    path.write_text(text)
    assert main(["quickstart", "--site", "local", "--traces", str(path)]) == 2
    assert refusal in capsys.readouterr().err


def test_calls_of_sessions_that_ran_at_the_same_time_may_alternate(tmp_path):
    path = tmp_path / "calls.csv"
    alternating = [f"{name},{5 * turn},{100 * turn + 50},10" for turn in range(3) for name in ("a", "b")]
    path.write_text("\n".join(["session,t_s,prompt_tokens,reply_tokens", *alternating, "a,1,60,10"]))
    assert [len(script.turns) for script in read_traces(path)] == [4, 3]


def test_calls_that_are_refused_can_be_left_out(tmp_path, capsys):
    path = tmp_path / "calls.csv"
    path.write_text(TRACES + "2,-1,10,10\n")
    assert len(read_traces(path, skips_invalid=True)) == 2
    assert "1 of 4 calls have values that cannot be, and are left out" in capsys.readouterr().err


def test_a_table_may_start_with_the_mark_that_excel_writes(tmp_path):
    path = tmp_path / "calls.csv"
    path.write_text("\ufeff" + TRACES, encoding="utf-8")
    assert len(read_traces(path)) == 2


def test_recorded_episodes_are_cut_where_the_recipe_would_end_them(capsys):
    recipe = load_request("quickstart", site="local").recipe
    longest, context = recipe.rollout.max_new_tokens, recipe.max_context
    episodes = [
        EpisodeScript(0.0, (TurnScript(5, 1, 1.0),)),
        EpisodeScript(0.0, (TurnScript(5, 10 * longest, 1.0), TurnScript(context, 1, 1.0))),
        EpisodeScript(0.0, (TurnScript(context, 1, 1.0),)),
    ]
    assert fit_episodes(episodes, recipe) == [episodes[0], EpisodeScript(0.0, (TurnScript(5, longest, 1.0),))]
    assert "2 of 3 episodes are longer than the recipe allows" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (["--gpus", "0"], "--gpus 0: give a number from 1"),
        (["--steps", "0"], "--steps 0: give a number from 1"),
        (["--env-s", "-1"], "--env-s -1: give a number from 0 to below 1e+09"),
        (["--env-s", "nan"], "--env-s nan: give a number from 0 to below 1e+09"),
        (["--env-sigma", "50"], "--env-sigma 50: give 5 at most"),
        (["--env-faults", "1"], "--env-faults 1: give a share"),
        (["--gpus", "100001"], "--gpus 100001: at most 100000 are simulated"),
        (["--engine-hours", "nan"], "--engine-hours nan: give a number above 0"),
        (["--engine-hours", "0"], "--engine-hours 0: give a number above 0"),
        (["--traces", ""], "--traces is empty: name a CSV file or a campaign"),
        (["--timeline", "nowhere/steps.svg"], "--timeline nowhere/steps.svg: the directory 'nowhere' does not exist"),
        (["--traces", "a.csv", "--env-s", "2"], "--env-s and --traces: recorded episodes have their own times"),
        (
            ["--traces", "my-campaign", "--reset-s", "0"],
            "--reset-s and --traces: recorded episodes have their own times",
        ),
        (["--skip-invalid"], "--skip-invalid is for the calls of a CSV file"),
        (["--skip-invalid", "--traces", "my-campaign"], "--skip-invalid is for the calls of a CSV file"),
        (["--traces", "nowhere.csv"], "nowhere.csv cannot be read (No such file or directory): give a CSV file"),
        (["--timeline", "steps.png", "--steps", "2"], "give a name that ends with .svg or .html"),
        (["-s", "engine.backend=sim", "-s", "engine.sim.gpu=x9"], "'x9' is not in the catalogue"),
    ],
)
def test_what_cannot_be_simulated_is_refused(capsys, words, refusal):
    assert main(["quickstart", "--site", "local", *words]) == 2
    assert refusal in capsys.readouterr().err


@pytest.mark.parametrize("name", ["calls.csv", "calls"])
def test_a_pipe_is_refused_as_traces(tmp_path, capsys, name):
    os.mkfifo(tmp_path / name)
    assert main(["quickstart", "--site", "local", "--traces", str(tmp_path / name)]) == 2
    assert f"{name} cannot be read (it is not a regular file): give a CSV file" in capsys.readouterr().err


def test_a_timeline_is_refused_before_anything_is_simulated(monkeypatch):
    monkeypatch.setattr("hpcrl.simulation.campaign.simulate_campaign", None)
    assert main(["quickstart", "--site", "local", "--timeline", "nowhere/steps.svg"]) == 2


def test_a_recipe_without_episodes_is_refused(capsys):
    assert main(["sft", "--site", "local"]) == 2
    assert "plays no episodes" in capsys.readouterr().err


def test_the_command_prints_figures_and_draws_a_timeline(tmp_path, capsys):
    picture = tmp_path / "steps.svg"
    words = ["quickstart", "--site", "local", "--steps", "4", "--timeline", str(picture)]
    assert main(words) == 0
    assert "step time" in capsys.readouterr().out
    assert picture.read_text().startswith("<svg")
    assert main([*words, "--json"]) == 0
    assert load_checked(capsys.readouterr().out, "simulate")["num_steps"] == 4


def test_a_timeline_has_a_row_for_each_role_and_escapes_names():
    result = msgspec.structs.replace(simulate(num_steps=3), recipe="<b>&")
    drawn = draw_timeline(result)
    assert all(f">{name}<" in drawn for name in ("decode", "train", "env", "episodes"))
    assert "<b>" not in drawn


def test_weights_take_their_time_to_other_nodes():
    request = load_request("qwen3-8b-math", site="perlmutter", settings=("site.account=x",))
    sizes, settings = find_sizes(request), SimulationSettings(num_steps=2)
    simulation = SimulatedCampaign(request, sizes, DrawnEpisodes(request.recipe, LatencySettings(), seed=0), settings)
    loads = []
    record_calls(simulation, "_load", loads, simulation.queue)
    simulation.run()
    assert sizes.estimate_travel_s() == pytest.approx(0.66, abs=0.02)
    assert any(note.startswith("a version of 15.3 GiB takes 0.6") for note in sizes.notes)
    wait_s = loads[0][0] - simulation.trainer.steps[0].ended_at
    assert wait_s == pytest.approx(settings.load_s + sizes.estimate_travel_s())


def test_weights_on_one_node_and_adapters_arrive_at_once():
    one_node = find_sizes(load_request("quickstart", site="local"))
    assert one_node.estimate_travel_s() == 0.0
    request = load_request("qwen3-8b-math", site="perlmutter", settings=("site.account=x", "train.lora_rank=16"))
    assert find_sizes(request).estimate_travel_s() < 0.02
