"""Who gets a place at which engine, by what its hardware does best, its places and its KV: pure decisions."""

import random

import pytest

from hpcrl.cost import ModelShape, pace
from hpcrl.endpoints import Endpoint
from hpcrl.engines.base import LoadFigures
from hpcrl.hardware import GPUS
from hpcrl.recipe import Routing
from hpcrl.rollout.courses import Course
from hpcrl.rollout.deciding import Ask, Known, decide, must_yield
from hpcrl.rollout.workers import ROOM, Worker, sorted_out

SHAPE = ModelShape(num_layers=36, num_heads=32, num_kv_heads=8, head_dim=128, num_dense=8_000_000_000)
ROLE = "decode"
PLACES = 32
KV = {gpu: pace(GPUS[gpu], shape=SHAPE).kv_tokens for gpu in ("h100", "h20")}


def worker(gpu, *, num_running=0, held=0, holding=0):
    endpoint = Endpoint(role=ROLE, worker=f"000-decode-{gpu}", node="n", url="u", token="t", gpu=gpu)
    made = Worker(endpoint, engine=None, pace=pace(GPUS[gpu], shape=SHAPE), role=ROLE)
    made.heard(
        LoadFigures(version=0, num_running=num_running, num_waiting=0, num_generated_tokens=0, num_places=PLACES)
    )
    made.usual_told = 0.0
    made.ours_held, made.ours_holding = held, holding
    return made


def known(*workers, **rules):
    return Known(sorted_out(workers), {each.name: each for each in workers}, Routing(remote_prefill="never", **rules))


def ask(num_prompt=1000, *, num_new=100, course=None):
    return Ask("lake", num_prompt, num_new, course or Course(), num_held=num_prompt)


def chosen(question, scene):
    return decide(question, scene, draw=random.Random(0)).decode


@pytest.mark.parametrize("num_running", [0, 10, 20])
def test_while_there_are_places_a_long_prompt_goes_to_compute(num_running):
    scene = known(worker("h100", num_running=num_running), worker("h20", num_running=0))
    assert chosen(ask(8000, num_new=10), scene) == "000-decode-h100"


def test_who_has_no_place_left_is_passed_over_for_slower_hardware():
    scene = known(worker("h100", num_running=2 * PLACES), worker("h20", num_running=10))
    assert chosen(ask(), scene) == "000-decode-h20"


def test_a_new_trajectory_waits_while_all_kv_is_spoken_for():
    full = [worker(gpu, held=KV[gpu], holding=9) for gpu in ("h100", "h20")]
    decision = decide(ask(), known(*full), draw=random.Random(0))
    assert (decision.decode, decision.reason) == (None, "no room for KV")
    assert chosen(ask(), known(*full, hold_back=False)) is not None


def test_a_trajectory_that_has_its_place_does_not_wait_for_room():
    full = worker("h100", held=int(0.95 * ROOM * KV["h100"]), holding=9)
    at_home = Course("lake", home=full.name, held_at=full.name, held=900, num_kept=900)
    assert chosen(ask(course=at_home), known(full)) == full.name


def test_a_trajectory_too_large_for_any_room_goes_on_where_it_is_alone():
    alone = worker("h100")
    assert chosen(ask(KV["h100"]), known(alone)) == alone.name


def test_where_trajectories_have_outgrown_the_kv_the_small_ones_give_way():
    full = worker("h100", held=KV["h100"], holding=10)
    small = Course("lake", home=full.name, held_at=full.name, held=1000)
    large = Course("lake", home=full.name, held_at=full.name, held=KV["h100"] // 2)
    assert must_yield(ask(course=small), known(full))
    assert not must_yield(ask(KV["h100"] // 2, course=large), known(full))
    assert not must_yield(ask(course=small), known(full, hold_back=False))


def test_nobody_gives_way_while_there_is_room_or_to_nobody():
    roomy = worker("h100", held=KV["h100"] // 2, holding=10)
    course = Course("lake", home=roomy.name, held_at=roomy.name, held=1000)
    assert not must_yield(ask(course=course), known(roomy))
    alone = worker("h100", held=2 * KV["h100"], holding=1)
    course = Course("lake", home=alone.name, held_at=alone.name, held=2 * KV["h100"])
    assert not must_yield(ask(course=course), known(alone))


def test_what_other_hosts_hold_is_reckoned_from_the_requests_they_have():
    shared = worker("h100", held=10_000, holding=2)
    shared.usual_told, shared.usual_ours = 8.0, 2.0
    assert shared.held(ours=10_000, each=1) == 40_000
    shared.usual_ours = 0.0
    assert shared.held(ours=0, each=500) == 4000
