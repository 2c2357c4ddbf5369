"""The pages of the monitor that keys choose, at any size of the terminal."""

import io
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from rich.cells import cell_len  # noqa: TID251
from rich.console import Console  # noqa: TID251

from hpcrl.campaign_dir.events import EngineCounted, EpisodesCounted, FaultReported, WorkerFailed
from hpcrl.monitor.collect import SnapshotCollector
from hpcrl.monitor.keys import HELP_LINES, PAGE_KEYS, KeyReader, ScreenPage
from hpcrl.monitor.pages import CampaignPages, TrajectoryListing
from hpcrl.system.files import make_private_dir
from tests.support.campaign_spools import Spools
from tests.support.synthetic import SyntheticCampaign
from tests.support.trajectories import make_trajectory

LONG = "RuntimeError: " + "x" * 300
PAGES = tuple(dict.fromkeys(PAGE_KEYS.values()))


class PressedKeys(KeyReader):
    """Keys that were pressed before the page is drawn."""

    has_keys = True

    def __init__(self, page: ScreenPage, *, num_roles_passed: int = 0) -> None:
        super().__init__()
        self.page, self.num_roles_passed = page, num_roles_passed


@pytest.fixture
def campaign(tmp_path: Path) -> SyntheticCampaign:
    """A campaign that runs, with much to show."""
    made = SyntheticCampaign(tmp_path / "quickstart-1", num_steps=40)
    made.submit()
    made.start(workers=3)
    for step in range(1, 21):
        made.now += 10
        made.step(step)
    made.emit("env-1", EpisodesCounted(running=3, done=12, outcomes={"sums": {"exit": 20}}))
    made.emit("driver", FaultReported(what="reward", detail=LONG))
    make_private_dir(made.directory.job(0).logs)
    lines = "".join(f"line {number} of a log, {'y' * 150}\n" for number in range(60))
    made.directory.job(0).log("batch").write_text(lines)
    made.beat_all()
    return made


@pytest.fixture
def show(campaign: SyntheticCampaign) -> Iterator[Callable[..., list[str]]]:
    """Show a page of the campaign, and return its lines."""
    collector = SnapshotCollector(campaign.directory, query=lambda ids: {}, clock=lambda: campaign.now)
    spools = Spools(campaign.directory.root.parent / "spools")
    spools.scored(*(make_trajectory(f"lake/{number}/0", domain="lake") for number in range(30)))
    words = ["ls", "spools", "--json", "--limit=20"]
    pages = CampaignPages(
        collector, traj_command=[sys.executable, "-m", "hpcrl.traj", str(spools.campaign.root), *words]
    )

    def draw(page: ScreenPage, *, width: int = 80, height: int = 24, num_roles_passed: int = 0) -> list[str]:
        snapshot, keys = collector.poll(), PressedKeys(page, num_roles_passed=num_roles_passed)
        console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)
        with console.capture() as capture:
            console.print(pages.render(snapshot, keys=keys, height=height - 1))
        return [line.rstrip() for line in capture.get().splitlines()]

    yield draw
    pages.close()


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize(("width", "height"), [(20, 8), (40, 24), (80, 24), (200, 60)])
def test_a_page_fits_any_terminal(show: Callable[..., list[str]], page: ScreenPage, width: int, height: int) -> None:
    lines = show(page, width=width, height=height)
    assert max(map(cell_len, lines)) <= width
    assert len(lines) < height
    assert lines[0].startswith("quickstart-")
    assert lines[-1].startswith("q quit  h help")


def test_a_role_that_is_shown_has_every_worker_those_that_ended_first_and_the_whole_reason(
    campaign: SyntheticCampaign, show: Callable[..., list[str]]
) -> None:
    load = EngineCounted(
        window_s=10.0, version=3, busy_share=0.9, running=4.0, waiting=7.0, num_tokens=500, kv_share=0.5
    )
    campaign.emit("decode-0", load)
    campaign.emit("driver", WorkerFailed(of="decode-2", reason=f"killed by signal 9 {LONG}"))
    lines = show("roles", num_roles_passed=2)
    assert "n next role: env prefill [decode] reward train" in lines
    assert "2 of 3 workers of role decode are alive" in lines
    assert "".join(lines).count("x") >= 300
    heads = next(place for place, line in enumerate(lines) if line.startswith("worker"))
    assert [line.split()[0] for line in lines[heads + 1 : heads + 4]] == ["decode-2", "decode-0", "decode-1"]
    assert dict(zip(lines[heads].split(), lines[heads + 2].split(), strict=True)) == {
        "worker": "decode-0",
        "node": "decode0",
        "state": "alive",
        "busy": "90%",
        "running": "4",
        "queue": "7",
        "tokens/s": "50",
        "kv": "50%",
        "version": "3",
    }


def test_a_worker_without_a_heartbeat_is_shown_as_silent(
    campaign: SyntheticCampaign, show: Callable[..., list[str]]
) -> None:
    campaign.now += 600
    campaign.beat("000-driver")
    assert any("silent for 10 min" in line for line in show("roles"))


def test_the_log_of_a_role_is_the_one_that_was_written_last_up_to_its_end(
    campaign: SyntheticCampaign, show: Callable[..., list[str]]
) -> None:
    job = campaign.directory.job(0)
    for number, text in enumerate(("older\n", "newer\n\x1b[31mthe reason\n")):
        job.log(f"train-{number}").write_text(text)
        os.utime(job.log(f"train-{number}"), (number, number))
    driver = show("logs")
    assert "n next role: [driver] env prefill decode reward train" in driver
    assert "batch.log" in driver
    assert driver[-2].endswith("yyy"), "the end of the last line"
    trainer = show("logs", num_roles_passed=5)
    assert trainer[-3:-1] == ["newer", r"\x1b[31mthe reason"]
    assert "env has no log yet" in show("logs", num_roles_passed=1)


def test_the_newest_trajectories_are_listed_by_another_process(show: Callable[..., list[str]]) -> None:
    deadline = time.monotonic() + 60
    while not any("lake/" in line for line in show("trajectories")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    lines = show("trajectories")
    assert len([line for line in lines if line.startswith("lake/")]) >= 15
    assert any(line.split()[:3] == ["id", "status", "reward"] for line in lines)


def read_problem(listing: TrajectoryListing) -> str:
    deadline = time.monotonic() + 60
    while not listing.problem and time.monotonic() < deadline:
        listing.refresh()
        time.sleep(0.05)
    return listing.problem


def test_a_list_that_cannot_be_made_names_the_reason(tmp_path: Path) -> None:
    assert "cannot be run here: No such file" in read_problem(TrajectoryListing([str(tmp_path / "python")]))
    refused = "import sys; sys.exit('\x1b[31mno h5py')"
    assert read_problem(TrajectoryListing([sys.executable, "-c", refused])) == r"\x1b[31mno h5py"
    assert read_problem(TrajectoryListing([sys.executable, "-c", "print('[{}]')"])).endswith("ended with code 0")
    assert "pip install" in read_problem(TrajectoryListing([]))


def test_a_list_that_is_being_made_ends_with_the_monitor() -> None:
    listing = TrajectoryListing(["sleep", "600"])
    listing.refresh()
    (child,) = [one for one in psutil.Process().children() if one.name() == "sleep"]
    listing.close()
    assert not child.is_running()


def test_help_names_every_key() -> None:
    named = {line.partition(" ")[0] for line in HELP_LINES}
    assert {key for key in PAGE_KEYS if key not in "h?"} | {"q"} <= named
    assert any("n: of the next role" in line for line in HELP_LINES)
