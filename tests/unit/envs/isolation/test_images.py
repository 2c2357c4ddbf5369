"""Images of apptainer, with a stand-in for it on PATH: pulled once for a node, kept while used, removed by age."""

import asyncio
import os
import re
import sys
from pathlib import Path

import pytest

from hpcrl.envs.agent import AgentProgram
from hpcrl.envs.base import ModelAccess
from hpcrl.envs.isolation.images import ImageCache, open_image
from hpcrl.envs.isolation.sandbox import SandboxSpec, choose_sandbox, wrap_command
from hpcrl.errors import EnvFault
from hpcrl.system.processes import list_descendants

FAKES = Path(__file__).parents[3] / "support/fakes"
PULL_IN_ANOTHER_PROCESS = """
import asyncio, sys
from hpcrl.envs.isolation.images import ImageCache, open_image
async def use():
    async with open_image("docker://a", ImageCache(directory=sys.argv[1])) as path:
        print(path)
asyncio.run(use())
"""


@pytest.fixture
def apptainer_log(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{FAKES}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_APPTAINER_LOG", str(tmp_path / "log"))
    return tmp_path / "log"


@pytest.fixture
def cache(tmp_path):
    return ImageCache(directory=str(tmp_path / "cache"), max_gib=2.5 / 1024)  # two images of the stand-in


async def use(image, cache):
    async with open_image(image, cache) as path:
        assert Path(path).stat().st_size == 1 << 20
        return path


def count_pulls(log):
    return sum(" pull " in f" {line} " for line in log.read_text().splitlines()) if log.exists() else 0


def test_an_image_is_pulled_once_by_all_processes_of_a_node(apptainer_log, cache):
    async def run():
        others = [
            await asyncio.create_subprocess_exec(
                sys.executable, "-c", PULL_IN_ANOTHER_PROCESS, cache.directory, stdout=asyncio.subprocess.PIPE
            )
            for _ in range(2)
        ]
        own = await asyncio.gather(*(use("docker://a", cache) for _ in range(4)))
        return {*own, *[(await other.communicate())[0].decode().strip() for other in others]}

    assert len(asyncio.run(run())) == 1
    assert count_pulls(apptainer_log) == 1


def test_the_image_that_was_not_used_for_the_longest_time_is_removed_first(apptainer_log, cache):
    async def run():
        first, second = await use("docker://1", cache), await use("docker://2", cache)
        os.utime(second, (1, 1))
        third = await use("docker://3", cache)
        return [Path(path).exists() for path in (first, second, third)]

    assert asyncio.run(run()) == [True, False, True]


def test_an_image_that_is_used_is_not_removed(apptainer_log, cache):
    async def run():
        async with open_image("docker://1", cache) as first:
            os.utime(first, (1, 1))
            for name in ("2", "3"):
                await use(f"docker://{name}", cache)
            return Path(first).exists()

    assert asyncio.run(run())
    assert len(list(Path(cache.directory).glob("*.sif"))) == 2


def test_an_image_that_cannot_be_pulled_is_a_fault_in_one_line_and_leaves_nothing(apptainer_log, cache):
    with pytest.raises(EnvFault, match=r"^image = 'docker://missing' cannot be pulled: FATAL: manifest unknown$"):
        asyncio.run(use("docker://missing", cache))
    assert [path.suffix for path in Path(cache.directory).iterdir()] == [".lock"]


async def start_use(image, cache, log):
    """Return an episode whose pull has started."""
    using, num_before = asyncio.create_task(use(image, cache)), count_pulls(log)
    while count_pulls(log) == num_before:
        await asyncio.sleep(0.01)
    return using


def test_a_pull_continues_when_the_episode_that_started_it_is_cancelled(apptainer_log, cache):
    async def run():
        first = await start_use("docker://a", cache, apptainer_log)
        second = asyncio.create_task(use("docker://a", cache))
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        return await second, await use("docker://a", cache)

    assert len(set(asyncio.run(run()))) == 1
    assert count_pulls(apptainer_log) == 1


def test_a_pull_that_takes_longer_than_any_episode_may_ends_with_an_image(apptainer_log, cache, monkeypatch):
    monkeypatch.setenv("FAKE_APPTAINER_PULL_S", "0.5")

    async def run():
        await start_use("docker://a", cache, apptainer_log)
        num_late = 0
        while True:
            try:
                async with asyncio.timeout(0.05):
                    return num_late, await use("docker://a", cache)
            except TimeoutError:
                num_late += 1

    num_late, _ = asyncio.run(run())
    assert num_late > 0
    assert count_pulls(apptainer_log) == 1


def test_a_pull_that_failed_is_tried_again_by_the_next_episode(apptainer_log, cache):
    async def run():
        for _ in range(2):
            ends = await asyncio.gather(*[use("docker://missing", cache) for _ in range(3)], return_exceptions=True)
            assert [type(end) for end in ends] == [EnvFault] * 3

    asyncio.run(run())
    assert count_pulls(apptainer_log) == 2


def test_a_pull_ends_with_its_worker_and_leaves_nothing(apptainer_log, cache, monkeypatch):
    monkeypatch.setenv("FAKE_APPTAINER_PULL_S", "60")

    async def run():
        (await start_use("docker://a", cache, apptainer_log)).cancel()

    before = set(list_descendants())
    asyncio.run(run())
    assert set(list_descendants()) <= before
    assert [path.suffix for path in Path(cache.directory).iterdir()] == [".lock"]


def test_a_cache_that_others_can_write_to_is_refused(apptainer_log, cache):
    Path(cache.directory).mkdir()
    Path(cache.directory).chmod(0o777)
    with pytest.raises(EnvFault, match="can be written by others"):
        asyncio.run(use("docker://a", cache))


def test_each_task_has_its_image(apptainer_log, tmp_path):
    (tmp_path / "blue.sif").write_text("")
    program = AgentProgram(
        command=["python", "-c", "import os\nprint(os.environ['HOME'] == '/episode/home' and 0.5)"],
        image=f"{tmp_path}/{{repo}}.sif",
    )
    access = ModelAccess(url="", socket=str(tmp_path / "socket"), api_key="key", model="m")
    with pytest.raises(EnvFault, match="no such file or directory"):
        asyncio.run(program.run(1, access, task={"repo": "red"}))
    assert asyncio.run(program.run(1, access, task={"repo": "blue"})) == 0.5
    (call,) = apptainer_log.read_text().splitlines()
    assert f"{tmp_path}/blue.sif python3 -I -S -c" in call
    assert "/program/work:/episode/work" in call


def test_an_image_is_never_ignored_without_being_asked(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None if name in ("apptainer", "singularity") else f"/bin/{name}")
    monkeypatch.setattr("hpcrl.envs.isolation.sandbox._find_bubblewrap_problem", lambda: "")
    with pytest.raises(EnvFault, match=r"^image = 'a.sif' needs apptainer, which is not installed on this node"):
        choose_sandbox("auto", image="a.sif")
    assert choose_sandbox("bubblewrap", image="a.sif") == "bubblewrap"
    assert choose_sandbox("auto", image=None) == "bubblewrap"


def test_apptainer_may_have_the_name_singularity(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/singularity").symlink_to(FAKES / "apptainer")
    (tmp_path / "bin/python3").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("FAKE_APPTAINER_LOG", str(tmp_path / "log"))
    image = asyncio.run(use("docker://a", ImageCache(directory=str(tmp_path / "cache"))))
    assert choose_sandbox("auto", image=image) == "apptainer"
    assert wrap_command(["x"], SandboxSpec(kind="apptainer", workdir="/w", image=image))[0] == "singularity"


def find_texts(*rows, **options):
    program = AgentProgram(command=["python", "-c", ""], **options)
    return [problem.text for row in rows or ({},) for problem in program.find_task_problems(row)] + [
        problem.text for problem in program.find_problems()
    ]


@pytest.mark.parametrize("options", [{"image": "/no/such.sif"}, {"directory": "/no/{name}", "task": {"name": "x"}}])
def test_what_is_known_not_to_be_there_is_found_at_submit(apptainer_log, options):
    (text,) = find_texts(**options)
    assert re.fullmatch(r"(image|directory) = '/no/\S+': no such (file or )?directory", text)


def test_an_image_of_a_registry_is_not_looked_for(apptainer_log):
    assert find_texts(image="docker://alpine:3") == []


def test_the_image_of_each_row_is_looked_for(apptainer_log, tmp_path):
    (tmp_path / "blue.sif").write_text("")
    image = f"{tmp_path}/{{repo}}.sif"
    assert find_texts({"repo": "blue"}, image=image) == []
    assert find_texts({"repo": "red"}, image=image) == [f"image = '{tmp_path}/red.sif': no such file or directory"]
    assert find_texts({"name": "red"}, image=image)[0].endswith("the task has no field 'repo'; it has name, seed")
