"""What a campaign exposes: its sockets, its need of a network, and the secrets of its environment.

One campaign serves all: with a staged model, in a network namespace that has only the loopback interface.
"""

import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.support.campaigns import SMALL, end_campaigns
from tests.support.hub_server import HubProcess

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="only root makes network namespaces, with ip"
)
MODEL = "acme/tiny-lm"
SECRET_NAME = "WANDB_API_KEY"
LISTENING = "0A"


@dataclass
class OfflineCampaign:
    """A campaign that has ended, and what was seen meanwhile."""

    root: Path
    secret: str
    output: str = ""
    code: int | None = None
    listening: set[str] = field(default_factory=set)
    """The hexadecimal addresses of sockets, as the kernel lists them."""
    had_secret: bool = False
    """A role had the secret in its environment."""


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Iterator[OfflineCampaign]:
    folder = tmp_path_factory.mktemp("offline")
    shutil.copytree(tiny_model_dir, folder / "hub" / "models" / MODEL)
    secret = secrets.token_hex(16)
    offline = OfflineCampaign(root=folder / "home", secret=secret)
    environment = os.environ | {
        "HPCRL_HOME": str(offline.root),
        "XDG_CONFIG_HOME": str(folder / "config"),
        SECRET_NAME: secret,
    }
    recipe = ["quickstart", "--site", "local", "-s", f"model.path={MODEL}", "-s", f'site.exports=["{SECRET_NAME}"]']
    hub = HubProcess(folder / "hub")
    hub.start()
    try:
        online = environment | {"HF_ENDPOINT": hub.address, "NO_PROXY": "127.0.0.1"}
        words = [sys.executable, "-m", "hpcrl.cli", "stage", *recipe]
        subprocess.run(words, env=online, check=True, capture_output=True, timeout=240)
    finally:
        hub.end()
    words = [sys.executable, "-m", "hpcrl.cli", "submit", *recipe, "--watch", *SMALL, "-s", "rollout.max_new_tokens=4"]
    command = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *words]
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 480
        while process.poll() is None and time.monotonic() < deadline:
            watch(process.pid, offline)
            time.sleep(0.2)
        process.kill()
        offline.code = process.wait()
    offline.output = (folder / "output").read_text()
    yield offline
    end_campaigns(offline.root)


def watch(pid: int, offline: OfflineCampaign) -> None:
    """Note the listening sockets of the namespace, and whether a role has the secret."""
    own = os.stat("/proc/self/ns/net").st_ino  # noqa: PTH116 - of the namespace
    try:
        if os.stat(f"/proc/{pid}/ns/net").st_ino == own:  # noqa: PTH116 - it has no namespace yet
            return
        for table in ("tcp", "tcp6", "udp", "udp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                _, local, remote, state, *_ = line.split()
                is_open = state == LISTENING if table.startswith("tcp") else set(remote) <= {"0", ":"}
                if is_open:
                    offline.listening.add(f"{table} {local}")
        for child in psutil.Process(pid).children(recursive=True):
            if not offline.had_secret and "hpcrl.roles" in child.cmdline():
                offline.had_secret = child.environ().get(SECRET_NAME) == offline.secret
    except (OSError, psutil.Error):  # it has ended meanwhile
        return


def test_a_campaign_with_a_staged_model_needs_no_network(campaign: OfflineCampaign) -> None:
    assert campaign.code == 0, campaign.output
    assert "is done" in campaign.output


def test_no_service_listens_on_all_interfaces(campaign: OfflineCampaign) -> None:
    assert campaign.listening
    everywhere = {one for one in campaign.listening if set(one.split()[1].partition(":")[0]) == {"0"}}
    assert everywhere == set()


def test_a_secret_of_the_environment_is_in_no_file(campaign: OfflineCampaign) -> None:
    assert campaign.had_secret
    files = [path for path in campaign.root.rglob("*") if path.is_file() and not path.is_symlink()]
    assert len(files) > 20
    assert [path for path in files if campaign.secret.encode() in path.read_bytes()] == []
