"""`hpcrl stage` as a program, with a server that imitates the hub: kept, damaged, interrupted, at once, full disk."""

import asyncio
import hashlib
import json
import os
import pty
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpcrl.campaign.request import load_request
from hpcrl.campaign.staged_files import MANIFEST
from hpcrl.campaign.submission_checks import find_unstaged
from hpcrl.envs.isolation.images import ImageCache, open_image
from hpcrl.slurm.script import find_driver_environment
from tests.support.hub_server import HubProcess, find_commit

MODEL = "acme/tiny-lm"
Stage = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def hub(tmp_path: Path, tiny_model_dir: Path) -> Iterator[HubProcess]:
    hub = HubProcess(tmp_path / "hub")
    shutil.copytree(tiny_model_dir, hub.find_model(MODEL))
    (hub.find_model(MODEL) / "pytorch_model.bin").write_bytes(b"the same weights")
    rows = hub.root / "datasets" / "acme" / "sums" / "data"
    rows.mkdir(parents=True)
    lines = [json.dumps({"question": f"{n} + {n}", "answer": str(2 * n)}) for n in range(40)]
    (rows / "train.jsonl").write_text("\n".join(lines) + "\n")
    hub.start()
    yield hub
    hub.end()


@pytest.fixture
def environment(hub: HubProcess, home: Path) -> dict[str, str]:
    names = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "HF_HUB_OFFLINE", "HF_TOKEN")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    return kept | {"HF_ENDPOINT": hub.address, "NO_PROXY": "", "HF_HUB_DISABLE_TELEMETRY": "1"}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "sums.toml"
    path.write_text(
        f"""
extends = "questions"
name = "sums"
model = {{path = "{MODEL}"}}
[domains.sums]
tasks = {{path = "hf://datasets/acme/sums/data/train.jsonl", held_out_rows = 8}}
"""
    )
    return path


def start_stage(recipe: Path, environment: dict[str, str], *settings: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "hpcrl.cli", "stage", str(recipe), "--site", "local"]
    words += [word for setting in settings for word in ("-s", setting)]
    return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run_hpcrl(*words: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hpcrl.cli", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)


@pytest.fixture
def stage(recipe: Path, environment: dict[str, str]) -> Stage:
    def run(*settings: str, **changes: str) -> subprocess.CompletedProcess[str]:
        process = start_stage(recipe, environment | changes, *settings)
        out, err = process.communicate(timeout=240)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    return run


def find_model_dir(home: Path) -> Path:
    link = home / "campaigns" / ".staged" / "models" / MODEL.replace("/", "--") / "main"
    return link.resolve()


def hash_file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_what_a_recipe_names_is_fetched_once_and_then_kept(hub: HubProcess, home: Path, stage: Stage) -> None:
    first = stage()
    assert first.returncode == 0, first.stderr
    folder = find_model_dir(home)
    assert folder.name == find_commit(hub.find_model(MODEL))
    assert hash_file(folder / "model.safetensors") == hash_file(hub.find_model(MODEL) / "model.safetensors")
    assert (folder / MANIFEST).exists()
    assert not (folder / "pytorch_model.bin").exists()
    rows = home / "campaigns" / ".staged" / "datasets" / "acme--sums" / "main" / "data" / "train.jsonl"
    assert rows.read_bytes() == (hub.root / "datasets/acme/sums/data/train.jsonl").read_bytes()

    hub.forget_requests()
    second = stage()
    assert second.returncode == 0
    assert "0 fetched" in second.stdout
    assert hub.read_requests() == []


def test_a_damaged_file_alone_is_fetched_again(hub: HubProcess, home: Path, stage: Stage) -> None:
    stage()
    path = find_model_dir(home) / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    hub.forget_requests()

    again = stage()

    assert "damaged before: model.safetensors" in again.stdout
    assert [request["file"] for request in hub.read_requests()] == ["model.safetensors"]
    assert hash_file(path) == hash_file(hub.find_model(MODEL) / "model.safetensors")


def test_a_campaign_keeps_its_commit_when_the_revision_moves_on(hub: HubProcess, home: Path, stage: Stage) -> None:
    stage()
    before = find_model_dir(home)
    (hub.find_model(MODEL) / "README.md").write_text("a new version")
    stage()
    after = find_model_dir(home)
    assert after != before
    assert after.name == find_commit(hub.find_model(MODEL))
    assert (before / "model.safetensors").exists()


def wait_for_partial(home: Path, *, min_bytes: int) -> Path:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for path in (home / "campaigns" / ".staged").rglob(".model.safetensors~*.part"):
            if path.stat().st_size >= min_bytes:
                return path
        time.sleep(0.02)
    raise AssertionError("nothing was fetched")


def make_large(hub: HubProcess, *, num_bytes: int) -> None:
    """Give the model a file of weights that takes a while."""
    (hub.find_model(MODEL) / "model.safetensors").write_bytes(os.urandom(num_bytes))


def test_what_was_killed_in_the_middle_of_a_file_is_continued_there(
    hub: HubProcess, home: Path, stage: Stage, recipe: Path, environment: dict[str, str]
) -> None:
    make_large(hub, num_bytes=32 << 20)
    hub.start(bytes_per_s=4 << 20)
    slow = start_stage(recipe, environment | {"HF_ENDPOINT": hub.address})
    wait_for_partial(home, min_bytes=1)
    slow.send_signal(signal.SIGKILL)
    slow.communicate()
    kept = wait_for_partial(home, min_bytes=1).stat().st_size
    hub.start()
    hub.forget_requests()

    again = stage(HF_ENDPOINT=hub.address)

    assert again.returncode == 0, again.stderr
    starts = [request["start"] for request in hub.read_requests() if request["file"] == "model.safetensors"]
    assert starts == [kept]
    folder = find_model_dir(home)
    assert hash_file(folder / "model.safetensors") == hash_file(hub.find_model(MODEL) / "model.safetensors")
    assert not list(folder.rglob("*.part"))


def test_two_at_once_fetch_each_file_once(
    hub: HubProcess, home: Path, recipe: Path, environment: dict[str, str]
) -> None:
    make_large(hub, num_bytes=16 << 20)
    hub.start(bytes_per_s=4 << 20)
    address = {"HF_ENDPOINT": hub.address}
    first = start_stage(recipe, environment | address)
    wait_for_partial(home, min_bytes=1)
    second = start_stage(recipe, environment | address)
    outcomes = [process.communicate(timeout=240) for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], outcomes
    fetched = [request["file"] for request in hub.read_requests() if request["sent"]]
    assert fetched.count("model.safetensors") == 1
    folder = find_model_dir(home)
    assert hash_file(folder / "model.safetensors") == hash_file(hub.find_model(MODEL) / "model.safetensors")
    assert not list(folder.rglob("*.part"))


def test_contents_with_another_digest_are_refused_and_not_recorded(hub: HubProcess, home: Path, stage: Stage) -> None:
    data = bytearray((hub.find_model(MODEL) / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (hub.find_model(MODEL) / "model.safetensors.sent").write_bytes(data)
    refused = stage()
    assert refused.returncode == 2
    assert "another digest" in refused.stderr
    assert not list(home.rglob(MANIFEST))
    assert not list(home.rglob("model.safetensors"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a small file system")
def test_a_disk_without_room_is_refused_before_anything_is_fetched(
    hub: HubProcess, tmp_path: Path, stage: Stage
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    make_large(hub, num_bytes=8 << 20)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], check=True)
    try:
        refused = stage(f"site.staging_dir={disk}")
        assert refused.returncode == 2
        assert "staging_dir" in refused.stderr
        assert hub.read_requests() == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a small file system")
def test_a_disk_that_others_fill_meanwhile_is_named_and_the_next_run_continues(
    hub: HubProcess, tmp_path: Path, stage: Stage, recipe: Path, environment: dict[str, str]
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    make_large(hub, num_bytes=16 << 20)
    hub.start(bytes_per_s=4 << 20)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(disk)], check=True)
    try:
        setting = f"site.staging_dir={disk}"
        process = start_stage(recipe, environment | {"HF_ENDPOINT": hub.address}, setting)
        deadline = time.monotonic() + 120
        while not list(disk.rglob("*.part")) and time.monotonic() < deadline:
            time.sleep(0.02)
        (disk / "of-others").write_bytes(bytes(14 << 20))
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 2
        assert "is full" in errors
        (disk / "of-others").unlink()
        hub.start()
        again = stage(setting, HF_ENDPOINT=hub.address)
        assert again.returncode == 0, again.stderr
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_proxy_that_is_down_is_named_with_what_to_do(stage: Stage) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    refused = stage(http_proxy=f"http://127.0.0.1:{port}", no_proxy="")
    assert refused.returncode == 2
    assert f"http_proxy=http://127.0.0.1:{port}" in refused.stderr


def test_without_the_hub_what_was_staged_is_compared_with_its_record(hub: HubProcess, home: Path, stage: Stage) -> None:
    stage()
    hub.end()
    again = stage()
    assert again.returncode == 0, again.stderr
    assert "compared with what was staged before" in again.stderr
    (find_model_dir(home) / "config.json").write_text("{}")
    assert stage().returncode == 2


@pytest.mark.parametrize(
    ("setting", "advice"),
    [
        ("model.path=acme/unknown", "has no model 'acme/unknown'"),
        (f"model.path={MODEL}@v9", "has no revision 'v9'"),
        ('domains.sums.tasks={path="hf://datasets/acme/sums/test.jsonl"}', "it has data/train.jsonl"),
    ],
)
def test_a_name_that_the_hub_does_not_have_is_refused(stage: Stage, setting: str, advice: str) -> None:
    refused = stage(setting)
    assert refused.returncode == 2
    assert advice in refused.stderr


def test_plan_and_submit_name_what_is_not_staged(
    recipe: Path, environment: dict[str, str], stage: Stage, home: Path
) -> None:
    planned = run_hpcrl("plan", str(recipe), "--site", "local", environment=environment)
    assert planned.returncode == 0, planned.stderr
    assert f"model.path: {MODEL} is not staged: `hpcrl stage {recipe} --site local` on" in planned.stderr
    assert "domains.sums.tasks.path: hf://datasets/acme/sums/data/train.jsonl is not staged" in planned.stderr
    assert "the size of the model is unknown until it is staged" in planned.stderr
    refused = run_hpcrl("submit", str(recipe), "--site", "local", environment=environment)
    assert refused.returncode == 2
    assert f"{MODEL} is not staged: `hpcrl stage" in refused.stderr

    assert stage().returncode == 0
    planned = run_hpcrl("plan", str(recipe), "--site", "local", environment=environment)
    assert planned.returncode == 0, planned.stderr
    assert "staged" not in planned.stderr

    (find_model_dir(home) / "model.safetensors").unlink()
    refused = run_hpcrl("submit", str(recipe), "--site", "local", environment=environment)
    assert "is missing, or was not copied to its end" in refused.stderr


FAKES = Path(__file__).parents[2] / "support" / "fakes"


@pytest.fixture
def image_recipe(tmp_path: Path) -> Path:
    rows = "".join(json.dumps({"repo": name}) + "\n" for name in ("astropy", "django", "astropy"))
    (tmp_path / "tasks.jsonl").write_text(rows)
    path = tmp_path / "repairs.toml"
    path.write_text(
        """
extends = "agent"
name = "repairs"
[domains.sums]
env = "hpcrl.envs.agent:AgentProgram"
tasks = "tasks.jsonl"
[domains.sums.options]
command = ["true"]
image = "docker://acme/{repo}"
"""
    )
    return path


def test_the_images_of_all_tasks_are_pulled_once_and_found_by_episodes(
    image_recipe: Path, environment: dict[str, str], home: Path, tmp_path: Path
) -> None:
    log = tmp_path / "pulls"
    environment |= {"PATH": f"{FAKES}:{os.environ['PATH']}", "FAKE_APPTAINER_LOG": str(log)}
    staged = run_hpcrl("stage", str(image_recipe), "--site", "local", environment=environment)
    assert staged.returncode == 0, staged.stderr
    pulled = sorted(line.split()[-1] for line in log.read_text().splitlines())
    assert pulled == ["docker://acme/astropy", "docker://acme/django"]

    again = run_hpcrl("stage", str(image_recipe), "--site", "local", environment=environment)
    assert again.stdout.count("was there") == 2
    assert len(log.read_text().splitlines()) == 2

    request = load_request(str(image_recipe), site="local")
    images = home / "campaigns" / ".staged" / "images"
    assert request.recipe.domains["sums"].options["staged_images"] == str(images)
    cache = ImageCache(directory=str(tmp_path / "cache"), staged=str(images))
    assert Path(asyncio.run(find_image("docker://acme/django", cache))).parent == images

    damaged = next(images.glob("*.sif"))
    damaged.write_bytes(b"x" * damaged.stat().st_size)
    run_hpcrl("stage", str(image_recipe), "--site", "local", environment=environment)
    assert len(log.read_text().splitlines()) == 3


def test_images_for_arm_nodes_are_warned_of_before_they_are_pulled(
    image_recipe: Path, environment: dict[str, str], home: Path, tmp_path: Path
) -> None:
    environment |= {"PATH": f"{FAKES}:{os.environ['PATH']}", "FAKE_APPTAINER_LOG": str(tmp_path / "pulls")}
    words = ["stage", str(image_recipe), "--site", "alps", "-s", f"site.campaigns_dir={home}"]
    staged = run_hpcrl(*words, environment=environment)
    assert "hpcrl: note: domains.sums.options.image = 'docker://acme/{repo}' runs on nodes of partition normal" in (
        staged.stderr
    )
    elsewhere = [*words, "-s", "site.partitions.normal.architecture=x86_64"]
    assert "aarch64" not in run_hpcrl(*elsewhere, environment=environment).stderr


def test_a_terminal_shows_which_image_is_pulled_and_the_output_has_no_more_than_without(
    image_recipe: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    environment |= {"PATH": f"{FAKES}:{os.environ['PATH']}", "FAKE_APPTAINER_LOG": str(tmp_path / "pulls")}
    user, terminal = pty.openpty()
    command = [sys.executable, "-m", "hpcrl.cli", "stage", str(image_recipe), "--site", "local"]
    done = subprocess.run(
        command, env=environment | {"TERM": "xterm"}, stdout=subprocess.PIPE, stderr=terminal, check=True, timeout=240
    )
    shown = os.read(user, 65536)
    os.close(terminal)
    os.close(user)
    assert b"docker://acme/django is pulled" in shown
    assert done.stdout.count(b"pulled, ") == 2
    assert b"is pulled" not in done.stdout


async def find_image(image: str, cache: ImageCache) -> str:
    async with open_image(image, cache) as path:
        return path


def test_the_image_of_steps_is_pulled_and_used_by_the_plan(
    environment: dict[str, str], home: Path, tmp_path: Path
) -> None:
    environment |= {"PATH": f"{FAKES}:{os.environ['PATH']}", "FAKE_APPTAINER_LOG": str(tmp_path / "pulls")}
    settings = (
        'site.container="apptainer"',
        'site.image="docker://acme/hpcrl"',
        'site.network.internet_on_compute="no"',
        f'site.campaigns_dir="{home}/campaigns"',
    )
    words = [word for setting in settings for word in ("-s", setting)]
    request = load_request("quickstart", site="lab", settings=settings)
    assert "docker://acme/hpcrl is not staged" in find_unstaged(request)[0]

    staged = run_hpcrl("stage", "quickstart", "--site", "lab", *words, environment=environment)

    assert staged.returncode == 0, staged.stderr
    request = load_request("quickstart", site="lab", settings=settings)
    assert find_unstaged(request) == []
    assert str(request.site.image).startswith(str(home / "campaigns" / ".staged" / "images"))
    assert find_driver_environment(request.plan, request.site)["HF_HUB_OFFLINE"] == "1"


def test_an_image_that_cannot_be_pulled_is_refused(
    image_recipe: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"repo": "missing"}\n')
    environment |= {"PATH": f"{FAKES}:{os.environ['PATH']}", "FAKE_APPTAINER_LOG": str(tmp_path / "pulls")}
    refused = run_hpcrl("stage", str(image_recipe), "--site", "local", environment=environment)
    assert refused.returncode == 2
    assert "cannot be pulled: FATAL: manifest unknown" in refused.stderr


def test_a_model_directory_beside_the_recipe_is_not_looked_for_on_the_hub(
    recipe: Path, environment: dict[str, str], tiny_model_dir: Path
) -> None:
    shutil.copytree(tiny_model_dir, recipe.parent / "models" / "own")
    own = recipe.parent / "own.toml"
    own.write_text('name = "own"\nextends = "quickstart"\n[model]\npath = "models/own"\n')
    staged = run_hpcrl("stage", str(own), "--site", "local", environment=environment)
    assert (staged.returncode, staged.stderr) == (0, "")
    assert "names no model" in staged.stdout
