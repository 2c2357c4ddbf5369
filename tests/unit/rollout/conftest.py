"""A judge of a campaign, and the proxy by which it is called."""

import pytest

from hpcrl.rollout.judges import proxy as proxy_module
from hpcrl.rollout.judges.proxy import JudgeProxy
from tests.support.served_judges import judge_host


@pytest.fixture
def host(tiny_model_dir, tmp_path):
    with judge_host(tiny_model_dir, tmp_path / "endpoints") as host:
        yield host


@pytest.fixture
def proxy(host, monkeypatch):
    monkeypatch.setattr(proxy_module, "PROBE_INTERVAL_S", 0.02)
    with JudgeProxy({"grader": host.directory}, job=0) as proxy:
        yield proxy
