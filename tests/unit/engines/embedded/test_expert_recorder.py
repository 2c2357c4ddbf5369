"""The experts that the embedded engine reports: those of the passes that generated, once, for every token read."""

import asyncio
import itertools
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from hpcrl.config.recipe import TinyModel
from hpcrl.engines.base import LOCAL_URL_PREFIX, Completion, GenerateRequest, join_chunks
from hpcrl.engines.embedded.engine import EmbeddedEngine, load_model
from hpcrl.engines.embedded.expert_recorder import ExpertHistory
from hpcrl.engines.embedded.kv_cache import RowKv, pack_kv, unpack_kv
from hpcrl.errors import EngineError, EngineRequestError
from hpcrl.models.expert_routers import find_routers
from hpcrl.models.tiny import _make_tokenizer
from hpcrl.rollout.turn import generate_turn
from hpcrl.spool.routed_experts import find_span_end, join_experts, place_span
from hpcrl.testing.memory import MemoryStore
from hpcrl.weights.versions import WeightVersion
from tests.support.embedded_engines import on
from tests.support.families import make_family_model

PROMPT = [2, 45, 78, 5, 36, 3]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory, tokenizer = tmp_path_factory.mktemp("model"), _make_tokenizer(TinyModel())
    make_family_model(directory, "qwen3_moe", vocab_size=len(tokenizer), max_position_embeddings=256, num_experts=8)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture
def model(model_dir: Path) -> Any:
    return load_model(model_dir, device="cpu")


def ask(request_id: str = "r", **changes: Any) -> GenerateRequest:
    request = GenerateRequest(request_id=request_id, token_ids=PROMPT, max_new_tokens=12, experts_from=0)
    return msgspec.structs.replace(request, **changes)


def make_engine(model: Any, **options: Any) -> EmbeddedEngine:
    return EmbeddedEngine(model, store=MemoryStore(), records_experts=True, **options)


@torch.inference_mode()
def choose(model: Any, token_ids: list[int]) -> NDArray[np.uint8]:
    """Return the experts that a plain pass chooses for tokens."""
    chosen: list[torch.Tensor] = []
    hooks = [router.register_forward_hook(lambda *given: chosen.append(given[2][2])) for router in find_routers(model)]
    model(input_ids=torch.tensor([token_ids]))
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, dim=1).numpy().astype(np.uint8)


def read(answer: Completion, num_tokens: int) -> NDArray[Any]:
    """Return the reported experts of the tokens of a turn, of which each is to be there once."""
    spans = sorted(answer.experts, key=lambda span: span.start)
    assert all(one.end == other.start for one, other in itertools.pairwise(spans)), spans
    column = join_experts(num_tokens, [place_span(span, range(num_tokens)) for span in spans])
    assert column is not None
    return column


def check_experts(model: Any, prompt: list[int], answer: Completion, *, start: int = 0) -> None:
    ids = prompt + answer.token_ids
    column, expected = read(answer, len(ids)), choose(model, ids)
    assert column.dtype == np.uint8
    np.testing.assert_array_equal(np.sort(column[start:-1], -1), np.sort(expected[start:-1], -1))
    assert (column[:start] == 0xFF).all()
    assert (column[-1] == 0xFF).all(), "no pass has read the last token"


def test_a_crowd_gets_the_experts_that_a_plain_pass_chooses(model: Any) -> None:
    rng = random.Random(4)
    shared = [rng.randrange(100) for _ in range(30)]
    requests = [
        ask(
            f"r{n}",
            token_ids=[*(shared if n % 2 else []), *(rng.randrange(100) for _ in range(rng.randint(1, 50)))],
            max_new_tokens=rng.randint(1, 12),
            seed=n,
        )
        for n in range(30)
    ]
    engine = make_engine(model, max_batch=7)

    async def staggered() -> list[Completion]:
        async def later(request: GenerateRequest, turns: int) -> Completion:
            for _ in range(turns):
                await asyncio.sleep(0.0005)
            return await engine.generate(request)

        return await asyncio.gather(*[later(request, n // 3) for n, request in enumerate(requests)])

    for request, answer in zip(requests, on(engine, staggered), strict=True):
        check_experts(model, request.token_ids, answer)


def test_kv_of_earlier_turns_has_its_experts_and_only_what_is_asked_for_is_reported(model: Any) -> None:
    engine = make_engine(model)

    async def turns() -> list[tuple[list[int], int, Completion]]:
        prompt, start, found = list(range(5, 45)), 0, []
        for turn in range(3):
            answer = await engine.generate(ask(str(turn), token_ids=prompt, experts_from=start))
            found.append((prompt, start, answer))
            start = find_span_end(answer.experts, start) or 0
            assert start == len(prompt) + len(answer.token_ids) - 1
            prompt = [*prompt, *answer.token_ids, 2, 50, 51, 3]
        again = await engine.generate(ask("again", token_ids=prompt))  # its KV is that of the turns
        return [*found, (prompt, 0, again)]

    for prompt, start, answer in on(engine, turns):
        check_experts(model, prompt, answer, start=start)


def test_a_stream_reports_each_token_once(model: Any) -> None:
    engine = make_engine(model)

    async def stream() -> Completion:
        return join_chunks([chunk async for chunk in engine.stream(ask())])

    answer = on(engine, stream)
    assert len(answer.experts) > 2
    check_experts(model, PROMPT, answer)


def test_tokens_keep_the_choice_of_the_pass_that_generated_after_them(model: Any, model_dir: Path) -> None:
    engine, other = make_engine(model), load_model(model_dir, device="cpu")
    stored = load_file(model_dir / "model.safetensors")
    changed = {name: -tensor if "mlp.gate.weight" in name else tensor for name, tensor in stored.items()}
    with torch.no_grad():
        for router in find_routers(other):
            router.weight.neg_()

    async def update() -> Completion:
        turn = asyncio.create_task(engine.generate(ask(max_new_tokens=60)))
        while (await engine.load_figures()).num_generated_tokens < 10:
            await asyncio.sleep(0)
        assert isinstance(engine._store, MemoryStore)
        engine._store.publish(changed, WeightVersion(version=1, step=1))
        await engine.load_version(1)
        return await turn

    old = load_model(model_dir, device="cpu")
    answer = on(engine, update)
    ids, num_old = PROMPT + answer.token_ids, len(PROMPT) + answer.versions.index(1)
    column = read(answer, len(ids))
    assert 0 < answer.versions.index(1) < 60
    mixed = choose(other, ids)
    mixed[: num_old - 1] = choose(old, ids)[: num_old - 1]
    np.testing.assert_array_equal(np.sort(column[:-1], -1), np.sort(mixed[:-1], -1))
    assert (np.sort(choose(old, ids), -1) != np.sort(mixed, -1)).any()


def test_a_turn_that_another_engine_continues_has_the_experts_of_both(model: Any) -> None:
    engine = make_engine(model)

    class Interrupted:
        num_calls = 0

        async def generate(self, request: GenerateRequest) -> Completion:
            self.num_calls += 1
            if self.num_calls > 1:
                return await engine.generate(request)
            first = await engine.generate(msgspec.structs.replace(request, max_new_tokens=5))
            return msgspec.structs.replace(first, finish_reason="aborted")

    answer = on(engine, lambda: generate_turn(Interrupted(), ask()))
    assert len(answer.token_ids) == 12
    check_experts(model, PROMPT, answer)


def test_handed_over_kv_has_its_experts_or_is_not_used(model: Any, model_dir: Path) -> None:
    engine = make_engine(model)
    plain = EmbeddedEngine(load_model(model_dir, device="cpu"), store=MemoryStore())

    async def hand_over() -> list[Completion]:
        answers = []
        async with plain:
            for source in (engine, plain):
                handle = await source.prefill(ask("p", experts_from=None))
                data = await source.take_kv(handle.url.removeprefix(LOCAL_URL_PREFIX))
                assert data is not None
                name = engine._handover_store.put(unpack_kv(data))
                engine._batch._prefixes.clear()
                kv = msgspec.structs.replace(handle, url=LOCAL_URL_PREFIX + name)
                answers.append(await engine.generate(ask("d", kv=kv)))
        return answers

    with_experts, without = on(engine, hand_over)
    assert (with_experts.remote_prefill, without.remote_prefill) == (True, False)
    for answer in (with_experts, without):
        check_experts(model, PROMPT, answer)


def test_torn_handed_over_experts_are_refused() -> None:
    kv = RowKv(token_ids=[1, 2], kv_KHTD=torch.zeros(2, 1, 2, 1), version=0, experts_TLK=np.zeros((3, 1, 1), np.uint8))
    with pytest.raises(EngineError, match="the experts of 3 of 2 tokens"):
        unpack_kv(pack_kv(kv))


def test_experts_of_torn_weights_are_forgotten(model: Any) -> None:
    engine = make_engine(model)
    batch, intact = engine._batch, [True]

    async def tear() -> Completion:
        turn = asyncio.create_task(engine.generate(ask()))
        while (await engine.load_figures()).num_generated_tokens < 3:
            await asyncio.sleep(0)
        async with engine._request_loop.between_steps:
            (row,) = batch.rows
            num, batch._is_intact = len(row.experts), lambda: intact[0]
            intact[0] = False
            assert batch.advance([]) == []
            assert (batch.is_torn, len(row.experts)) == (True, num)
            intact[0], batch.is_torn = True, False
        engine._request_loop.wake()
        return await turn

    check_experts(model, PROMPT, on(engine, tear))


def test_an_engine_without_a_record_refuses_to_report(model: Any) -> None:
    engine = EmbeddedEngine(model, store=MemoryStore())
    with pytest.raises(EngineRequestError, match="asks for experts, which this engine does not record"):
        on(engine, lambda: engine.generate(ask()))


def test_a_model_without_experts_is_refused(tiny_model_dir: Path) -> None:
    with pytest.raises(EngineError, match=r"train\.router_replay = true needs a model with experts"):
        make_engine(load_model(tiny_model_dir, device="cpu"))


def test_a_history_keeps_what_was_added_first() -> None:
    history = ExpertHistory()
    history.add(0, np.full((3, 1, 2), 1, np.uint8))
    history.add(1, np.full((4, 1, 2), 2, np.uint8))
    assert history.read(0, 9)[:, 0, 0].tolist() == [1, 1, 1, 2, 2]
    history.cut(4)
    history.add(4, np.full((1, 1, 2), 3, np.uint8))
    assert history.read(2, 5)[:, 0, 0].tolist() == [1, 2, 3]
