"""Routing decisions by hardware, places and KV of the workers."""

import random
from dataclasses import replace

import msgspec
import pytest

from hpcrl.config.recipe import RouterConfig
from hpcrl.engines.base import LoadFigures
from hpcrl.hardware.cost_model import ModelShape, estimate_speed
from hpcrl.hardware.gpus import GPU_CATALOGUE
from hpcrl.rollout.routing.decision import RoutingView, TurnFacts, choose_workers, should_release_kv
from hpcrl.rollout.routing.engines import MAX_KV_SHARE, EngineState, build_pools, estimate_foreign_kv
from hpcrl.rollout.routing.trajectories import TrajectoryState
from tests.support.endpoints import make_endpoint

SHAPE = ModelShape(num_layers=36, num_heads=32, num_kv_heads=8, head_dim=128, num_dense=8_000_000_000)
PLACES = 32
KV = {gpu: estimate_speed(GPU_CATALOGUE[gpu], shape=SHAPE).kv_tokens for gpu in ("h100", "h20")}


def worker(gpu, *, role="decode", num_running=0, held=0, holding=0, version=0):
    endpoint = make_endpoint(f"000-{role}-{gpu}", gpu=gpu)
    made = EngineState(endpoint, engine=None, speed=estimate_speed(GPU_CATALOGUE[gpu], shape=SHAPE), role=role)
    made.update_load(
        LoadFigures(version=version, num_running=num_running, num_waiting=0, num_generated_tokens=0, num_places=PLACES),
        now=0.0,
    )
    made.mean_reported = 0.0
    made.own_kv_tokens, made.num_own_trajectories = held, holding
    return made


def known(*workers, **rules):
    return RoutingView(
        build_pools(workers),
        {each.name: each for each in workers},
        RouterConfig(**{"remote_prefill": "never", **rules}),
    )


def ask(num_prompt=1000, *, num_new=100, course=None):
    return TurnFacts("lake", num_prompt, num_new, course or TrajectoryState(), num_held=num_prompt)


def chosen(question, scene):
    return choose_workers(question, scene, draw=random.Random(0)).decode


@pytest.mark.parametrize("num_running", [0, 10, 20])
def test_while_there_are_places_a_long_prompt_goes_to_compute(num_running):
    scene = known(worker("h100", num_running=num_running), worker("h20", num_running=0))
    assert chosen(ask(8000, num_new=10), scene) == "000-decode-h100"


def test_a_worker_without_free_places_is_skipped_for_slower_hardware():
    scene = known(worker("h100", num_running=2 * PLACES), worker("h20", num_running=10))
    assert chosen(ask(), scene) == "000-decode-h20"


@pytest.mark.parametrize(
    ("versions", "num_running", "expected"),
    [((2, 3), 0, "h20"), ((3, 3), 0, "h100"), ((2, 2), 0, "h100"), ((2, 3), PLACES, "h100")],
)
def test_a_turn_prefers_engines_with_free_places_that_have_its_version(versions, num_running, expected):
    first, second = versions
    scene = known(worker("h100", version=first), worker("h20", version=second, num_running=num_running))
    turn = replace(ask(8000, num_new=10), min_version=3)
    assert chosen(turn, scene) == f"000-decode-{expected}"


def test_a_new_trajectory_waits_while_all_kv_is_spoken_for():
    full = [worker(gpu, held=KV[gpu], holding=9) for gpu in ("h100", "h20")]
    decision = choose_workers(ask(), known(*full), draw=random.Random(0))
    assert (decision.decode, decision.reason) == (None, "no room for KV")
    assert chosen(ask(), known(*full, kv_admission=False)) is not None


def test_a_trajectory_that_has_its_place_does_not_wait_for_room():
    full = worker("h100", held=int(0.95 * MAX_KV_SHARE * KV["h100"]), holding=9)
    at_home = TrajectoryState("lake", home=full.name, held_at=full.name, held_tokens=900, num_cached=900)
    assert chosen(ask(course=at_home), known(full)) == full.name


def test_a_trajectory_too_large_for_any_room_runs_where_it_is_alone():
    alone = worker("h100")
    assert chosen(ask(KV["h100"]), known(alone)) == alone.name


def test_small_trajectories_release_their_kv_when_an_engine_overflows():
    full = worker("h100", held=KV["h100"], holding=10)
    small = TrajectoryState("lake", home=full.name, held_at=full.name, held_tokens=1000)
    large = TrajectoryState("lake", home=full.name, held_at=full.name, held_tokens=KV["h100"] // 2)
    assert should_release_kv(ask(course=small), known(full))
    assert not should_release_kv(ask(KV["h100"] // 2, course=large), known(full))
    assert not should_release_kv(ask(course=small), known(full, kv_admission=False))


def test_no_trajectory_releases_its_kv_while_there_is_room_or_no_other():
    roomy = worker("h100", held=KV["h100"] // 2, holding=10)
    course = TrajectoryState("lake", home=roomy.name, held_at=roomy.name, held_tokens=1000)
    assert not should_release_kv(ask(course=course), known(roomy))
    alone = worker("h100", held=2 * KV["h100"], holding=1)
    course = TrajectoryState("lake", home=alone.name, held_at=alone.name, held_tokens=2 * KV["h100"])
    assert not should_release_kv(ask(course=course), known(alone))


def shared_worker(*, reported, own, held=0, holding=0, running=0, tokens=0):
    shared = worker("h100", held=held, holding=holding)
    shared.mean_reported, shared.mean_own, shared.own_requests = float(reported), float(own), own
    shared.mean_running, shared.mean_tokens = float(running), float(tokens)
    return shared


def test_foreign_kv_is_estimated_from_the_kv_that_the_engine_reports():
    shared = shared_worker(reported=8, own=2, held=10_000, holding=2, running=8, tokens=32_000)
    estimate_foreign_kv([shared])
    assert shared.foreign_kv_tokens == 6 * 4000


def test_other_workers_are_assumed_to_have_the_same_share_between_two_turns():
    shared = shared_worker(reported=8, own=2, held=12_000, holding=3, running=8, tokens=32_000)
    estimate_foreign_kv([shared])
    assert shared.foreign_kv_tokens == 6 * 4000 * 1.5


def test_few_own_trajectories_at_one_worker_do_not_affect_the_estimate_there():
    crowded = shared_worker(reported=30, own=10, held=20_000, holding=10, running=30, tokens=60_000)
    lonely = shared_worker(reported=30, own=1, held=30_000, holding=1, running=30, tokens=60_000)
    estimate_foreign_kv([crowded, lonely])
    assert lonely.foreign_kv_tokens == 29 * 2000


def test_without_reported_kv_foreign_trajectories_count_like_own_ones():
    shared = shared_worker(reported=8, own=2, held=10_000, holding=2)
    estimate_foreign_kv([shared])
    assert shared.foreign_kv_tokens == 6 * 5000


def at_home(where, *, num_kept):
    return TrajectoryState(
        "lake", home=where.name, held_at=where.name, held_tokens=num_kept, num_cached=num_kept, version=0
    )


@pytest.mark.parametrize("num_running", [10, PLACES, PLACES + 10])
def test_a_trajectory_stays_where_its_kv_is_however_full_it_is_at_the_moment(num_running):
    home, other = worker("h100", num_running=num_running), worker("h20")
    question = ask(10_100, num_new=100, course=at_home(home, num_kept=10_000))
    assert chosen(question, known(home, other)) == home.name


def test_a_trajectory_leaves_a_home_that_has_twice_its_places_in_requests():
    home, other = worker("h100", num_running=3 * PLACES), worker("h20")
    question = ask(1100, num_new=100, course=at_home(home, num_kept=1000))
    assert chosen(question, known(home, other)) == other.name


def test_a_trajectory_with_a_long_tool_output_leaves_for_hardware_that_reads_it_faster():
    home, other = worker("h20"), worker("h100", num_running=20)
    course = at_home(home, num_kept=3000)
    assert chosen(ask(11_000, num_new=100, course=course), known(home, other)) == other.name
    assert chosen(ask(3200, num_new=100, course=course), known(home, other)) == home.name
    assert chosen(ask(11_000, num_new=100, course=course), known(home, other, migration_factor=10.0)) == home.name


def test_a_trajectory_does_not_leave_for_an_engine_whose_kv_is_spoken_for():
    home, full = worker("h20"), worker("h100", held=KV["h100"], holding=9)
    assert chosen(ask(11_000, num_new=100, course=at_home(home, num_kept=3000)), known(home, full)) == home.name


def test_a_trajectory_whose_home_is_gone_continues_even_without_room():
    full = worker("h100", held=KV["h100"], holding=9)
    lost = TrajectoryState("lake", home="gone", held_at="gone", held_tokens=900, num_cached=900)
    assert chosen(ask(course=lost), known(full)) == full.name


def test_a_trajectory_that_released_its_kv_waits_for_hardware_no_slower_than_its_home():
    full, slow = worker("h100", held=KV["h100"], holding=9), worker("h20")
    released = TrajectoryState("lake", home=full.name, num_cached=0)
    assert chosen(ask(5000, course=released), known(full, slow)) is None
    fast = worker("h100")
    fast.endpoint = msgspec.structs.replace(fast.endpoint, worker="another")
    assert chosen(ask(5000, course=released), known(full, slow, fast)) == "another"


TABLE = {"lake": "compute", "default": "bandwidth"}


def apart(*, busy=0, **rules):
    """Return workers as a plan assigns them on a site with both kinds: compute prefills, bandwidth decodes."""
    workers = worker("h100", role="prefill", num_running=busy), worker("h20", num_running=1)
    return known(*workers, affinity=TABLE, **{"remote_prefill": "always", **rules})


def test_a_domain_that_wants_compute_is_served_whole_by_prefill_workers():
    decision = choose_workers(ask(), apart(), draw=random.Random(0))
    assert (decision.decode, decision.prefill) == ("000-prefill-h100", None)


def test_a_domain_that_wants_bandwidth_is_decoded_by_decode_workers():
    other = TurnFacts("shop", 1000, 100, TrajectoryState(), num_held=1000)
    decision = choose_workers(other, apart(), draw=random.Random(0))
    assert (decision.decode, decision.prefill) == ("000-decode-h20", "000-prefill-h100")


def test_without_a_table_prefill_workers_decode_nothing():
    scene = known(worker("h100", role="prefill"), worker("h20"))
    assert chosen(ask(), scene) == "000-decode-h20"


def test_a_domain_whose_prefill_workers_are_full_is_decoded_by_decode_workers():
    assert chosen(ask(), apart(busy=3 * PLACES)) == "000-decode-h20"


def test_a_trajectory_goes_back_to_the_prefill_worker_that_has_its_kv():
    at_home = TrajectoryState(
        "lake", home="000-prefill-h100", held_at="000-prefill-h100", held_tokens=900, num_cached=900
    )
    assert chosen(ask(course=at_home), apart(busy=PLACES)) == "000-prefill-h100"
