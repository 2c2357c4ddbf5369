"""The router, against engines that answer, refuse, hang and die as scripted."""

import asyncio
import dataclasses

import msgspec
import pytest

from hpcrl.campaign_dir.endpoints import EndpointReader, announce_endpoint, withdraw_endpoint
from hpcrl.config.recipe import RouterConfig
from hpcrl.engines.base import CompletionChunk, GenerateRequest, KvHandle, LoadFigures
from hpcrl.engines.version_gate import MAX_VERSION_WAIT_S
from hpcrl.errors import EngineError, EngineRefusedError
from hpcrl.hardware.cost_model import ModelShape, estimate_speed
from hpcrl.hardware.gpus import GPU_CATALOGUE
from hpcrl.rollout.routing.engines import RouterTimeouts
from hpcrl.rollout.routing.role_switch import MIN_OVERLOAD_S, RoleSwitcher, read_switched_roles
from hpcrl.rollout.routing.router import DEFAULT_RULES, Router
from hpcrl.testing.virtual_time import run_virtual
from tests.support.completions import make_completion
from tests.support.endpoints import make_endpoint

FAST = RouterTimeouts(
    refresh_interval_s=0.01,
    first_pause_s=0.05,
    load_timeout_s=0.2,
    prefill_timeout_s=0.2,
    stall_timeout_s=0.5,
    no_decode_timeout_s=0.5,
    max_attempts=3,
)
ALWAYS = RouterConfig(remote_prefill="always")
REQUEST = GenerateRequest(request_id="lake/0/0/0/0/0", token_ids=[1, 2], max_new_tokens=4)


class Fake:
    """An engine whose calls succeed, fail or hang by `mood`."""

    def __init__(self, endpoint):
        self.endpoint = endpoint
        self.mood = "well"
        self.version = 0
        self.running = 0
        self.is_asleep = False
        self.pieces = []
        self.breaks = False
        self.generated = []
        self.prefilled = []
        self.aborted = []

    async def _feel(self):
        if self.mood in ("dead", "broken"):
            raise EngineError(f"{self.endpoint.worker} is {self.mood}")
        if self.mood == "full":
            raise EngineRefusedError("no room")
        if self.mood == "hung":
            await asyncio.Event().wait()

    async def generate(self, request):
        self.generated.append(request)
        await self._feel()
        return make_completion(finish_reason="length")

    async def stream(self, request):
        for token_ids in self.pieces:
            num = len(token_ids)
            yield CompletionChunk(token_ids=token_ids, logprobs=[-1.0] * num, versions=[0] * num)
        if self.breaks:
            raise EngineError("the connection was lost")

    async def prefill(self, request):
        self.prefilled.append(request)
        await self._feel()
        return KvHandle(url=f"kv:{self.endpoint.worker}", token="t", version=0, num_tokens=1)

    async def abort(self, request_id):
        self.aborted.append(request_id)

    async def load_figures(self):
        if self.mood == "dead":
            raise EngineError("connection refused")
        return LoadFigures(
            version=self.version,
            num_running=self.running,
            num_waiting=0,
            num_generated_tokens=0,
            is_asleep=self.is_asleep,
        )


class Pool:
    """Announced endpoints and the engines behind them."""

    def __init__(self, directory):
        self.directory = directory
        self.engines = {}

    def add(self, role, number=0, **changed):
        worker = f"000-{role}-{number}"
        announce_endpoint(self.directory, make_endpoint(worker, **{"url": f"http://n/{worker}", **changed}))
        return worker

    @property
    def endpoints(self):
        """The announced endpoints, looked at each time."""
        return EndpointReader(self.directory, job=0, longest_s=0.0)

    def connect(self, endpoint):
        return self.engines.setdefault(endpoint.worker, Fake(endpoint))

    def router(self, *, seed=0, patience=FAST, rules=DEFAULT_RULES):
        return Router(self.endpoints, connect=self.connect, seed=seed, timeouts=patience, rules=rules)


@pytest.fixture
def pool(tmp_path):
    return Pool(tmp_path)


def loads(router, role):
    """Return the workers of a role that may be chosen now, with their loads."""
    return {worker.name: worker.load for kind in router._view.pools.of_role(role).values() for worker in kind}


def test_a_prefill_worker_whose_gpus_the_trainer_has_is_not_chosen(pool):
    asleep, awake = pool.add("prefill", 0), pool.add("prefill", 1)
    pool.add("decode")

    async def run():
        pool.connect(next(one for one in pool.endpoints.poll() if one.worker == asleep)).is_asleep = True
        async with pool.router(rules=ALWAYS) as router:
            for _ in range(8):
                await router.generate(REQUEST)
            chosen = loads(router, "prefill")
            pool.engines[awake].is_asleep = True
            await router.refresh()
            await router.generate(REQUEST)
            return chosen, router.reasons["prefill failed"]

    assert asyncio.run(run()) == ({awake: 0}, 0)
    assert pool.engines[asleep].prefilled == []
    assert len(pool.engines[awake].prefilled) == 8
    assert len(pool.engines["000-decode-0"].generated) == 9


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_turn_that_needs_a_version_goes_to_the_workers_that_have_it(pool, role):
    for each in ("prefill", "decode"):
        pool.add(each, 0)
    behind, current = f"000-{role}-0", pool.add(role, 1)

    async def run():
        pool.connect(next(one for one in pool.endpoints.poll() if one.worker == current)).version = 3
        async with pool.router(rules=ALWAYS) as router:
            for number in range(8):
                await router.generate(msgspec.structs.replace(REQUEST, request_id=f"{number}", min_version=3))

    asyncio.run(run())
    served = {name: len(engine.prefilled + engine.generated) for name, engine in pool.engines.items()}
    assert (served[behind], served[current]) == (0, 8)


@pytest.mark.parametrize(("version", "num_prefilled"), [(0, 1), (3, 0)])
def test_a_prompt_goes_to_no_prefill_worker_that_is_behind_its_decode_worker(pool, version, num_prefilled):
    behind, decode = pool.add("prefill"), pool.add("decode")

    async def run():
        pool.connect(next(one for one in pool.endpoints.poll() if one.worker == decode)).version = version
        async with pool.router(rules=ALWAYS) as router:
            await router.generate(msgspec.structs.replace(REQUEST, min_version=3))

    asyncio.run(run())
    assert len(pool.engines[behind].prefilled) == num_prefilled


def test_a_turn_does_not_wait_for_a_prefill_worker_that_falls_asleep(pool):
    name = pool.add("prefill")
    pool.add("decode")

    async def run():
        async with pool.router(patience=dataclasses.replace(FAST, prefill_timeout_s=1000.0), rules=ALWAYS) as router:
            pool.engines[name].mood = "hung"
            turn = asyncio.create_task(router.generate(REQUEST))
            while not pool.engines[name].prefilled:
                await asyncio.sleep(0.001)
            pool.engines[name].is_asleep = True
            completion = await turn
            pool.engines[name].is_asleep = False
            await router.refresh()
            return completion, loads(router, "prefill"), dict(router.reasons)

    completion, chosen, reasons = asyncio.run(run())
    assert completion.token_ids == [9]
    assert chosen == {name: 0}, "it did not fail"
    assert reasons == {"remote prefill": 1, "prefill asleep": 1}


@pytest.mark.parametrize("needed", [0, 3])
def test_a_prompt_that_waits_for_a_version_has_not_failed(pool, needed):
    name = pool.add("prefill")
    pool.add("decode")

    async def run():
        async with pool.router(rules=ALWAYS) as router:
            pool.engines[name].mood = "hung"
            turn = asyncio.create_task(router.generate(msgspec.structs.replace(REQUEST, min_version=needed)))
            await asyncio.wait([turn], timeout=MAX_VERSION_WAIT_S)
            is_over = turn.done()
            turn.cancel()
            return is_over

    assert run_virtual(run()) == (not needed)


def test_a_turn_is_prefilled_and_handed_over(pool):
    pool.add("prefill")
    pool.add("decode")

    async def run():
        async with pool.router(rules=ALWAYS) as router:
            return await router.generate(REQUEST), router.reasons

    completion, reasons = asyncio.run(run())
    assert completion.token_ids == [9]
    assert pool.engines["000-prefill-0"].prefilled == [REQUEST]
    (decoded,) = pool.engines["000-decode-0"].generated
    assert decoded.kv.url == "kv:000-prefill-0"
    assert reasons == {"remote prefill": 1}


def test_the_prefill_worker_knows_what_the_decode_worker_holds(pool):
    pool.add("prefill")
    pool.add("decode")
    first = msgspec.structs.replace(REQUEST, trajectory="t")
    longer = msgspec.structs.replace(first, token_ids=[*REQUEST.token_ids, 9, 5, 6, 7])

    async def run():
        async with pool.router(rules=ALWAYS) as router:
            await router.generate(first)
            await router.generate(longer)

    asyncio.run(run())
    num_computed = len(REQUEST.token_ids)  # not yet of the token that it generated
    assert [request.num_held for request in pool.engines["000-prefill-0"].prefilled] == [0, num_computed]


@pytest.mark.parametrize("mood", [None, "dead", "broken", "hung"])
def test_without_prefill_the_decode_worker_computes_the_prompt(pool, mood):
    pool.add("decode")
    if mood:
        pool.connect(make_endpoint(pool.add("prefill"))).mood = mood

    async def run():
        async with pool.router() as router:
            await router.generate(REQUEST)

    asyncio.run(run())
    assert [request.kv for request in pool.engines["000-decode-0"].generated] == [None]


@pytest.mark.parametrize("mood", ["broken", "hung"])
def test_a_turn_that_fails_is_served_elsewhere(pool, mood):
    for number in range(2):
        pool.add("decode", number)

    async def run():
        async with pool.router() as router:
            first = pool.engines["000-decode-0"]
            first.mood = mood
            for _ in range(8):
                await router.generate(REQUEST)
            return first

    first = asyncio.run(run())
    assert first.generated
    assert len(pool.engines["000-decode-1"].generated) == 8


class Slow(Fake):
    """An engine that generates `pace` tokens a second in all, and answers after `answer_s`."""

    answer_s, pace = 0.0, 0.0

    async def generate(self, request):
        self.generated.append(request)
        await asyncio.sleep(self.answer_s)
        return make_completion(finish_reason="length")

    async def load_figures(self):
        generated = int(self.pace * asyncio.get_running_loop().time())
        return LoadFigures(version=0, num_running=1, num_waiting=0, num_generated_tokens=generated)


def answer_slowly(pool, *, answer_s, pace, max_new_tokens):
    worker = pool.add("decode")
    engine = pool.engines[worker] = Slow(worker)
    engine.answer_s, engine.pace = answer_s, pace

    async def run():
        timeouts = RouterTimeouts(max_attempts=1, refresh_interval_s=5.0)
        async with pool.router(patience=timeouts) as router:
            return await router.generate(msgspec.structs.replace(REQUEST, max_new_tokens=max_new_tokens))

    return run_virtual(run())


@pytest.mark.parametrize(("pace", "max_new_tokens"), [(40.0, 32_000), (0.3, 2_000)])
def test_a_long_answer_is_awaited_as_long_as_its_worker_generates(pool, pace, max_new_tokens):
    assert answer_slowly(pool, answer_s=max_new_tokens / pace, pace=pace, max_new_tokens=max_new_tokens).token_ids


def test_a_worker_that_generates_nothing_fails_its_turn(pool):
    with pytest.raises(EngineError, match="generated its last token of any turn 600 s ago"):
        answer_slowly(pool, answer_s=700.0, pace=0.0, max_new_tokens=32_000)


def test_a_worker_that_forgot_a_turn_fails_it_although_it_generates(pool):
    with pytest.raises(EngineError, match="did not finish 1000 tokens in 1600 s"):
        answer_slowly(pool, answer_s=1e6, pace=100.0, max_new_tokens=1000)


def test_a_worker_that_failed_rests_and_comes_back(pool):
    pool.add("decode")

    async def run():
        async with pool.router() as router:
            engine = pool.engines["000-decode-0"]
            engine.mood = "broken"
            serving = asyncio.create_task(router.generate(REQUEST))
            while not engine.generated:
                await asyncio.sleep(0)
            engine.mood = "well"
            await serving
            return len(engine.generated)

    assert asyncio.run(run()) == 2


def test_a_worker_that_is_dead_is_offered_one_attempt_only(pool):
    pool.add("decode")

    async def run():
        async with pool.router() as router:
            engine = pool.engines["000-decode-0"]
            engine.mood = "dead"
            with pytest.raises(EngineError, match=r"no decode worker .* for 0\.5 s"):
                await router.generate(REQUEST)
            return len(engine.generated)

    assert asyncio.run(run()) <= 1


def test_attempts_are_bounded_and_their_reasons_reported(pool):
    pool.add("decode")

    async def run():
        async with pool.router() as router:
            pool.engines["000-decode-0"].mood = "broken"
            await router.generate(REQUEST)

    with pytest.raises(EngineError, match="3 attempts to generate failed: 000-decode-0 is broken; 000-decode-0"):
        asyncio.run(run())


def test_no_decode_worker_in_time_is_an_error_that_names_the_logs(pool):
    async def run():
        async with pool.router() as router:
            await router.generate(REQUEST)

    with pytest.raises(EngineError, match=r"no decode worker .*: see the logs of role decode"):
        asyncio.run(run())


def test_a_decode_worker_that_appears_later_is_waited_for(pool):
    async def run():
        async with pool.router() as router:
            serving = asyncio.create_task(router.generate(REQUEST))
            await asyncio.sleep(0.02)
            pool.add("decode")
            return await serving

    assert asyncio.run(run()).token_ids == [9]


def test_a_withdrawn_worker_is_offered_nothing_more(pool):
    pool.add("decode", 0)
    pool.add("decode", 1)

    async def run():
        async with pool.router() as router:
            withdraw_endpoint(pool.directory, "000-decode-0")
            await router.refresh()
            for _ in range(5):
                await router.generate(REQUEST)

    asyncio.run(run())
    assert not pool.engines["000-decode-0"].generated


def test_a_worker_that_was_restarted_is_connected_again(pool):
    pool.add("decode")
    urls = []

    async def run():
        router = Router(pool.endpoints, connect=lambda e: urls.append(e.url) or Fake(e), seed=0, timeouts=FAST)
        await router.refresh()
        pool.add("decode", url="http://n/other")
        await router.refresh()
        await router.refresh()

    asyncio.run(run())
    assert urls == ["http://n/000-decode-0", "http://n/other"]


def test_an_engine_that_is_expected_is_looked_for_before_its_time(pool):
    patience = dataclasses.replace(FAST, least_refresh_interval_s=1000.0)

    async def run():
        router = pool.router(patience=patience)
        await router.refresh()
        pool.add("decode")
        await router.refresh_soon()
        before = router.versions()
        router.expect_engine()
        await router.refresh_soon()
        return before, router.versions()

    before, after = asyncio.run(run())
    assert before == []
    assert len(after) == 1


def test_loads_are_those_reported_corrected_by_requests_sent_since(pool):
    pool.add("decode")

    async def run():
        router = pool.router()
        await router.refresh()
        engine = pool.engines["000-decode-0"]
        engine.running = 5
        await router.refresh()
        reported = loads(router, "decode")["000-decode-0"]
        engine.mood = "hung"
        serving = asyncio.create_task(router.generate(REQUEST))
        while not engine.generated:
            await asyncio.sleep(0)
        while_own_runs = loads(router, "decode")["000-decode-0"]
        engine.running = 6
        await router.refresh()
        reported_with_own = loads(router, "decode")["000-decode-0"]
        serving.cancel()
        await asyncio.wait({serving})
        return reported, while_own_runs, reported_with_own, loads(router, "decode")["000-decode-0"]

    assert asyncio.run(run()) == (5, 6, 6, 5)


def test_garbage_among_the_endpoints_leaves_those_known_in_use(pool):
    pool.add("decode")

    async def run():
        async with pool.router() as router:
            (pool.directory / "000-decode-9.json").write_bytes(b"\x00garbage")
            await router.refresh()
            await router.generate(REQUEST)
            return router.reasons["endpoints unreadable"]

    assert asyncio.run(run()) >= 1


def test_a_refresh_that_breaks_is_not_waited_on_in_silence(pool):
    def broken(endpoint):
        raise TypeError("connect takes two arguments")

    async def run():
        async with Router(pool.endpoints, connect=broken, seed=0, timeouts=FAST) as router:
            pool.add("decode")
            await router.generate(REQUEST)

    with pytest.raises(TypeError, match="connect takes two"):
        asyncio.run(run())


def of_trajectory(turn, trajectory="lake/0/0"):
    return msgspec.structs.replace(REQUEST, request_id=f"{trajectory}/0/{turn}", trajectory=trajectory, domain="lake")


def test_a_worker_that_refuses_is_passed_over_and_not_sent_to_rest(pool):
    for number in range(2):
        pool.add("decode", number)

    async def run():
        async with pool.router() as router:
            pool.engines["000-decode-0"].mood = "full"
            for turn in range(8):
                await router.generate(of_trajectory(turn))
            return sorted(loads(router, "decode")), router.reasons["decode failed"]

    assert asyncio.run(run()) == (["000-decode-0", "000-decode-1"], 0)
    assert len(pool.engines["000-decode-1"].generated) == 8


def test_a_turn_that_all_refuse_waits_for_room(pool):
    pool.add("decode")

    async def run():
        async with pool.router() as router:
            engine = pool.engines["000-decode-0"]
            engine.mood = "full"
            serving = asyncio.create_task(router.generate(REQUEST))
            while len(engine.generated) < 2:
                await asyncio.sleep(0)
            engine.mood = "well"
            return await serving

    assert asyncio.run(run()).token_ids == [9]


def test_a_trajectory_goes_back_to_its_home(pool):
    for number in range(8):
        pool.add("decode", number)

    async def run():
        async with pool.router() as router:
            for turn in range(10):
                await router.generate(of_trajectory(turn))

    asyncio.run(run())
    assert [len(engine.generated) for engine in pool.engines.values() if engine.generated] == [10]


def test_a_trajectory_leaves_a_home_that_is_much_more_loaded(pool):
    for number in range(2):
        pool.add("decode", number)

    async def run():
        async with pool.router() as router:
            await router.generate(of_trajectory(0))
            home = next(engine for engine in pool.engines.values() if engine.generated)
            home.running = 80
            await router.refresh()
            await router.generate(of_trajectory(1))
            return len(home.generated)

    assert asyncio.run(run()) == 1


def test_the_state_of_a_trajectory_is_forgotten_with_it(pool):
    pool.add("decode")

    async def run():
        async with pool.router() as router:
            await router.generate(of_trajectory(0))
            known = len(router.trajectories)
            router.forget("lake/0/0")
            return known, len(router.trajectories)

    assert asyncio.run(run()) == (1, 0)


def test_decisions_are_logged_when_they_are_sampled(pool):
    pool.add("decode")
    routed = []

    async def run():
        rules = RouterConfig(log_share=1.0)
        async with Router(
            pool.endpoints, connect=pool.connect, seed=0, timeouts=FAST, rules=rules, on_route=routed.append
        ) as router:
            await router.generate(of_trajectory(0))

    asyncio.run(run())
    assert [(one.decode, one.domain, one.reason) for one in routed] == [("000-decode-0", "lake", "no prefill endpoint")]


def test_a_worker_that_switched_serves_the_other_role(pool, tmp_path_factory):
    pool.add("prefill")
    for number in range(2):
        pool.add("decode", number)
    path = tmp_path_factory.mktemp("roles") / "switched-roles.json"
    path.write_text('{"000-decode-1": "prefill"}')

    async def run():
        switcher = RoleSwitcher(path, rules=RouterConfig(switch_roles=True), is_leader=False)
        async with Router(pool.endpoints, connect=pool.connect, seed=0, timeouts=FAST, switcher=switcher) as router:
            return sorted(loads(router, "prefill")), sorted(loads(router, "decode"))

    assert asyncio.run(run()) == (["000-decode-1", "000-prefill-0"], ["000-decode-0"])


def test_the_leader_switches_a_worker_when_an_overload_has_lasted(pool, tmp_path_factory):
    pool.add("prefill")
    for number in range(2):
        pool.add("decode", number)
    path = tmp_path_factory.mktemp("roles") / "switched-roles.json"

    async def run():
        switcher = RoleSwitcher(path, rules=RouterConfig(switch_roles=True), is_leader=True)
        async with Router(pool.endpoints, connect=pool.connect, seed=0, switcher=switcher) as router:
            pool.engines["000-prefill-0"].running = 40
            await asyncio.sleep(MIN_OVERLOAD_S + 5)
            return sorted(loads(router, "prefill"))

    assert len(run_virtual(run())) == 2
    assert set(read_switched_roles(path).values()) == {"prefill"}


def test_a_domain_is_served_by_the_hardware_that_the_recipe_names(pool):
    pool.add("decode", 0, gpu="h100")
    pool.add("decode", 1, gpu="h20")

    async def run():
        rules = RouterConfig(affinity={"lake": "compute", "default": "bandwidth"})
        async with Router(pool.endpoints, connect=pool.connect, seed=0, timeouts=FAST, rules=rules) as router:
            for number in range(4):
                lake, sums = (
                    msgspec.structs.replace(REQUEST, request_id=f"{name}/{number}/0/0/0/0", domain=name)
                    for name in ("lake", "sums")
                )
                await router.generate(lake)
                await router.generate(sums)

    asyncio.run(run())
    served = {name: {one.domain for one in engine.generated} for name, engine in pool.engines.items()}
    assert served == {"000-decode-0": {"lake"}, "000-decode-1": {"sums"}}


@pytest.mark.parametrize(("choice", "num_prefilled"), [("always", 1), ("never", 0)])
def test_remote_prefill_follows_the_recipe(pool, choice, num_prefilled):
    pool.add("prefill")
    pool.add("decode")

    async def run():
        rules = RouterConfig(remote_prefill=choice)
        async with Router(pool.endpoints, connect=pool.connect, seed=0, timeouts=FAST, rules=rules) as router:
            await router.generate(REQUEST)

    asyncio.run(run())
    assert len(pool.engines["000-prefill-0"].prefilled) == num_prefilled
    assert len(pool.engines["000-decode-0"].generated) == 1


@pytest.mark.parametrize(("num_prompt", "num_prefilled"), [(2, 0), (20_000, 1)])
def test_auto_prefills_elsewhere_if_that_is_faster(pool, num_prompt, num_prefilled):
    pool.add("prefill", gpu="h100")
    pool.add("decode", gpu="h20")
    shape = ModelShape(num_layers=36, num_heads=32, num_kv_heads=8, head_dim=128, num_dense=8_000_000_000)

    async def run():
        async with Router(
            pool.endpoints,
            connect=pool.connect,
            seed=0,
            timeouts=FAST,
            rules=RouterConfig(remote_prefill="auto"),
            speed_of=lambda endpoint: estimate_speed(GPU_CATALOGUE[endpoint.gpu], shape=shape),
        ) as router:
            await router.generate(msgspec.structs.replace(REQUEST, token_ids=[1] * num_prompt))

    asyncio.run(run())
    assert len(pool.engines["000-prefill-0"].prefilled) == num_prefilled


def test_sizing_by_the_cost_model_moves_a_worker_to_the_role_that_lacks_one(pool, tmp_path_factory):
    pool.add("prefill", gpu="h20")
    for number in range(5):
        pool.add("decode", number, gpu="h20")
    shape = ModelShape(num_layers=36, num_heads=32, num_kv_heads=8, head_dim=128, num_dense=8_000_000_000)
    path = tmp_path_factory.mktemp("roles") / "switched-roles.json"
    rules = RouterConfig(sizing="auto")

    async def run():
        async with Router(
            pool.endpoints,
            connect=pool.connect,
            seed=0,
            rules=rules,
            speed_of=lambda endpoint: estimate_speed(GPU_CATALOGUE[endpoint.gpu], shape=shape),
            switcher=RoleSwitcher(path, rules=rules, is_leader=True),
        ) as router:
            await router.generate(msgspec.structs.replace(REQUEST, token_ids=[1] * 20_000))  # long prompt, short reply
            await asyncio.sleep(MIN_OVERLOAD_S + 5)
            return len(loads(router, "prefill"))

    assert run_virtual(run()) == 2


def test_a_streamed_turn_is_sent_as_it_is_generated(pool):
    pool.add("decode")

    async def run():
        async with pool.router() as router:
            pool.engines["000-decode-0"].pieces = [[3], [4, 5]]
            return [piece.token_ids async for piece in router.stream(REQUEST)]

    assert asyncio.run(run()) == [[3], [4, 5]]


def test_chunks_sent_before_an_engine_failed_are_kept_and_the_turn_ends_there(pool):
    for number in range(2):
        pool.add("decode", number)

    async def run():
        async with pool.router() as router:
            for engine in pool.engines.values():
                engine.pieces, engine.breaks = [[3]], True
            received = []
            completion = await router.generate(REQUEST, on_chunk=received.append)
            return completion.token_ids, completion.finish_reason, len(received), len(loads(router, "decode"))

    assert asyncio.run(run()) == ([3], "aborted", 1, 1)


def test_an_engine_that_fails_before_its_first_chunk_is_replaced_by_the_next(pool):
    for number in range(2):
        pool.add("decode", number)

    async def run():
        async with pool.router() as router:
            first, second = pool.engines.values()
            first.breaks, second.pieces = True, [[7]]
            return [(await router.generate(again(number), on_chunk=lambda _: None)).token_ids for number in range(4)]

    assert asyncio.run(run()) == [[7]] * 4


def again(number):
    return msgspec.structs.replace(REQUEST, request_id=f"lake/{number}/0/0/0/0")


def test_a_turn_that_is_held_back_continues_when_a_trajectory_ends(pool):
    pool.add("decode")
    small = estimate_speed(
        GPU_CATALOGUE["h20"], shape=ModelShape(num_layers=2, num_heads=2, num_kv_heads=1, head_dim=32, num_dense=90000)
    )
    small = dataclasses.replace(small, kv_tokens=20)

    async def run():
        router = Router(pool.endpoints, connect=pool.connect, seed=0, timeouts=FAST, speed_of=lambda _: small)
        async with router:
            await router.generate(of_trajectory(0))
            (worker,) = router._workers.values()
            held = worker.own_kv_tokens, worker.num_own_trajectories
            other = msgspec.structs.replace(of_trajectory(0, "other"), token_ids=[1] * 19)
            waiting = asyncio.create_task(router.generate(other))
            while not router.reasons["held back"]:
                await asyncio.sleep(0)
            was_waiting = not waiting.done()
            router.forget("lake/0/0")
            await waiting
            router.forget("other")
            return held, was_waiting, (worker.own_kv_tokens, worker.num_own_trajectories)

    held, was_waiting, left = asyncio.run(run())
    assert held[1] == 1
    assert held[0] > 0
    assert was_waiting
    assert left == (0, 0)
