"""Judges: engines behind OpenAI's API, and the proxy at which reward functions call them, also while one is gone."""

import asyncio
import contextlib
import os
import threading
import time

import aiohttp
import httpx
import msgspec
import openai
import pytest
import yarl
from aiohttp import web

from hpcrl.campaign_dir.endpoints import announce_endpoint, list_endpoints
from hpcrl.envs.judge import judge as ask_judge
from hpcrl.envs.judge_access import find_judge, find_judges
from hpcrl.errors import ConfigError, EnvFault
from hpcrl.rollout.judge_outages import JudgeOutages
from hpcrl.rollout.judges import proxy as proxy_module
from hpcrl.rollout.judges.proxy import JudgeProxy
from hpcrl.rollout.judges.server import serve_judge
from hpcrl.system.files import make_private_dir
from hpcrl.system.tls import make_certificate
from tests.support.trajectories import make_lake_trajectory

QUESTION = [{"role": "user", "content": "2+2?"}]


@pytest.fixture
def client(proxy):
    access = find_judges()["grader"]
    with openai.OpenAI(base_url=access.url, api_key=access.api_key, max_retries=0, timeout=60) as client:
        yield client


def chat(client, **changed):
    return client.chat.completions.create(
        **({"model": "grader", "messages": QUESTION, "max_tokens": 8, "temperature": 0} | changed)
    )


@pytest.mark.parametrize("backend", ["embedded", "sim"])
def test_the_openai_client_calls_a_judge_on_every_backend(host, client, backend):
    host.start(backend=backend)
    answer = chat(client)
    assert answer.model == "grader"
    assert 1 <= answer.usage.completion_tokens <= 8
    assert client.models.list().data[0].id == "grader"


def test_greedy_answers_of_a_judge_are_the_same_whole_and_streamed(host, client):
    host.start()
    whole = chat(client).choices[0].message.content
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chat(client, stream=True) if chunk.choices)
    assert whole == streamed == chat(client).choices[0].message.content


def test_a_request_that_the_judge_refuses_is_the_matter_of_the_function(host, client):
    host.start()
    chat(client)
    before = time.time() + 1
    with pytest.raises(openai.BadRequestError, match="temperature"):
        chat(client, temperature=9)
    assert not JudgeOutages.from_environment().have_failed_since(["grader"], before)


def test_a_wrong_key_and_an_unknown_judge_are_refused(host, client):
    host.start()
    with pytest.raises(openai.AuthenticationError, match="HPCRL_JUDGE_GRADER_API_KEY"):
        chat(client.with_options(api_key="other"))
    with pytest.raises(openai.NotFoundError, match="the recipe has grader"):
        chat(client.with_options(base_url=str(client.base_url).replace("grader", "other")))


def test_the_key_of_a_judge_opens_no_other(tmp_path):
    with JudgeProxy({name: make_private_dir(tmp_path / name) for name in ("grader", "user")}, job=0):
        judges = find_judges()
        headers = {"Authorization": f"Bearer {judges['user'].api_key}"}
        assert httpx.get(judges["grader"].url + "/models", headers=headers).status_code == 401
        assert httpx.get(judges["user"].url.replace("user", "other"), headers=headers).status_code == 404


@pytest.mark.parametrize("path", ["/v1/../pause", "/v1/models?q=%C3%A9%23", "/v1/a%2Fb"])
def test_a_server_of_a_judge_is_sent_the_path_that_was_checked(tmp_path, path):
    class RecordingApi:
        socket_path = tmp_path / "s"

        @contextlib.asynccontextmanager
        async def open_key(self):
            yield ""

    async def body():
        async def answer(http):
            return web.Response(text=http.path_qs)

        runner = web.ServerRunner(web.Server(answer))
        await runner.setup()
        await web.UnixSite(runner, str(RecordingApi.socket_path)).start()
        async with serve_judge(RecordingApi(), host="127.0.0.1", token="t") as url, aiohttp.ClientSession() as client:
            headers = {"Authorization": "Bearer t"}
            async with client.get(yarl.URL(url + path, encoded=True), headers=headers) as answered:
                seen = answered.status, await answered.text()
        await runner.cleanup()
        return seen

    assert asyncio.run(body()) == (200, path)


def test_an_address_of_a_judge_refuses_others_and_hides_other_routes(host):
    url = host.start()
    for path, key, status in (("/v1/models", "wrong", 401), ("/pause", None, 404)):
        (endpoint,) = list_endpoints(host.directory)
        response = httpx.get(url + path, headers={"Authorization": f"Bearer {key or endpoint.token}"})
        assert response.status_code == status


def test_a_request_waits_for_a_judge_that_is_not_up_yet(host, client):
    assert JudgeOutages.from_environment().find_gone(["grader"]) == ["grader"]
    threading.Timer(0.2, host.start).start()
    assert chat(client).model == "grader"
    assert JudgeOutages.from_environment().find_gone(["grader"]) == []


def test_a_judge_that_was_started_again_is_found_at_the_same_address(host, client):
    host.start()
    chat(client)
    started = time.time()
    host.end()
    threading.Timer(0.2, host.start).start()
    assert chat(client).model == "grader"
    assert JudgeOutages.from_environment().have_failed_since(["grader"], started)


def test_a_judge_that_stays_away_is_answered_with_503(host, client, monkeypatch):
    monkeypatch.setattr(proxy_module, "CALL_HOLD_TIMEOUT_S", 0.1)
    with pytest.raises(openai.InternalServerError, match="no engine of judge 'grader' was up"):
        chat(client)


def test_endpoints_of_an_earlier_job_and_of_dead_engines_are_not_called(host, client):
    host.start(worker="000-judge-grader-0", job=7)
    host.start(worker="000-judge-grader-1", job=0)
    (alive,) = [one for one in list_endpoints(host.directory) if one.job == 0]
    dead = {"url": "http://127.0.0.1:9", "worker": "000-judge-grader-2", "token": "of a dead one"}
    announce_endpoint(host.directory, msgspec.structs.replace(alive, **dead))
    assert [chat(client).model for _ in range(4)] == ["grader"] * 4


def test_a_judge_is_called_by_tls_where_there_is_a_certificate(host, tmp_path):
    make_certificate(tmp_path / "tls.pem")
    assert host.start(certificate=tmp_path / "tls.pem").startswith("https://")
    with JudgeProxy({"grader": host.directory}, job=0, certificate=tmp_path / "tls.pem"):
        access = find_judge("grader")
        with openai.OpenAI(base_url=access.url, api_key=access.api_key) as client:
            assert chat(client).model == "grader"


def test_the_variables_of_judges_are_there_while_the_proxy_is_open(host):
    with JudgeProxy({"grader": host.directory, "safety_2": host.directory}, job=0):
        assert list(find_judges()) == ["grader", "safety_2"]
        assert find_judge("safety_2").url.endswith("/safety_2/v1")
        assert os.environ["HPCRL_JUDGE_GRADER_URL"].startswith("http://127.0.0.1:")
    assert find_judges() == {}
    with pytest.raises(ConfigError, match=r"add \[judge.grader\] to the recipe"):
        find_judge("grader")


def test_the_built_in_reward_asks_a_judge_of_the_campaign(host, proxy):
    host.start()
    with pytest.raises(EnvFault, match="no number from 0 to 10"):  # a random model gives none
        asyncio.run(ask_judge(make_lake_trajectory(), text="hello", judge="grader", attempts=1, max_tokens=8))
