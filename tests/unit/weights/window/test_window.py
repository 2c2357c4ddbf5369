"""The window of a node: readers get whole versions, whatever happens to writers, readers, memory and names."""

import mmap
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from hpcrl.campaign_dir.paths import CampaignDir, JobDir
from hpcrl.errors import WeightsError
from hpcrl.testing.ranks import RANK_SERVER
from hpcrl.weights.layout import TensorLayout
from hpcrl.weights.stores.file_store import FileStore
from hpcrl.weights.stores.store import ROUNDING_CHUNK_BYTES, NewestSource
from hpcrl.weights.stores.window_store import WindowStore
from hpcrl.weights.versions import WeightVersion
from hpcrl.weights.window import window as windows
from hpcrl.weights.window.file import (
    SHARED_MEMORY,
    SLOT_HEAD_OFFSETS,
    WindowKey,
    make_window_key,
    unlink_recorded_windows,
)
from hpcrl.weights.window.window import Window
from tests.support.disks import largest_file

LAYOUT = TensorLayout.pack([("a", "float32", (1000,)), ("b", "bfloat16", (7, 3)), ("c", "int64", ())])
LARGE = TensorLayout.pack([("a", "uint8", (32 << 20,))])


def key(campaign: CampaignDir, node: str = "node") -> WindowKey:
    return make_window_key(campaign, node=node)


def made(campaign: CampaignDir, *, job: int = 0, layout: TensorLayout = LAYOUT) -> Window:
    return Window.create(key(campaign), layout, job=campaign.job(job))


def put(window: Window, version: int, *, fill: int | None = None) -> None:
    slot = window.start_version(version, step=version)
    slot[:] = bytes([(version if fill is None else fill) % 256]) * len(slot)
    window.commit()


def opened(campaign: CampaignDir, job: int | None = None) -> Window:
    window = Window.open(key(campaign), job=job)
    assert window is not None
    return window


def content(window: Window, version: int) -> set[int]:
    with window.read_version(version) as slot:
        return set(bytes(slot))


def newest(window: Window) -> int | None:
    manifest = window.newest()
    return None if manifest is None else manifest.version


# ---- versions


def test_a_version_is_visible_only_when_it_is_committed(campaign: CampaignDir) -> None:
    writer, reader = made(campaign), opened(campaign)
    assert newest(reader) is None
    slot = writer.start_version(4, step=2)
    slot[:] = b"\x04" * len(slot)
    assert newest(reader) is None
    manifest = writer.commit()
    assert reader.newest() == manifest
    assert (manifest.version, manifest.step, list(manifest.checksums)) == (4, 2, ["a", "b", "c"])
    assert content(reader, 4) == {4}


def test_two_versions_are_held_and_the_one_in_use_stays_while_the_next_is_written(campaign: CampaignDir) -> None:
    writer, reader = made(campaign), opened(campaign)
    for version in (1, 2, 3):
        put(writer, version)
    assert reader.versions() == [2, 3]
    writer.start_version(4, step=4)[:] = b"\xff" * LAYOUT.nbytes
    assert reader.versions() == [3]
    assert content(reader, 3) == {3}


@pytest.mark.parametrize("version", [3, 2, -1])
def test_versions_never_go_back(campaign: CampaignDir, version: int) -> None:
    writer = made(campaign)
    put(writer, 3)
    with pytest.raises(WeightsError, match="never go back"):
        writer.start_version(version, step=0)


def test_a_version_that_is_not_there_is_refused_with_those_that_are(campaign: CampaignDir) -> None:
    put(made(campaign), 3)
    with pytest.raises(WeightsError, match=r"version 2 is not in .*available: 3"), opened(campaign).read_version(2):
        pass


def test_checksums_of_another_node_are_compared_before_anything_is_visible(campaign: CampaignDir) -> None:
    writer = made(campaign)
    put(writer, 1)
    slot = writer.start_version(2, step=2)
    slot[:] = b"\x02" * len(slot)
    sums = dict(writer.commit().checksums)
    for wrong, complaint in (
        (sums | {"b": "0" * 32}, "tensor 'b' arrived with checksum"),
        ({name: sums[name] for name in ("a", "c")}, "tensor 'b' is in the layout or in the announcement"),
        (sums | {"d": "0" * 32}, "tensor 'd'"),
    ):
        slot = writer.start_version(3, step=3)
        slot[:] = b"\x02" * len(slot)
        with pytest.raises(WeightsError, match=complaint):
            writer.commit(wrong)
        assert newest(opened(campaign)) == 2
    slot = writer.start_version(3, step=3)
    slot[:] = b"\x02" * len(slot)
    assert writer.commit(sums).checksums == sums


def test_a_damaged_tensor_is_named_and_the_other_version_still_reads(campaign: CampaignDir) -> None:
    writer = made(campaign)
    put(writer, 1)
    slot = writer.start_version(2, step=2)
    slot[:] = b"\x02" * len(slot)
    writer.commit()
    slot[LAYOUT.tensors_by_name()["b"].offset] ^= 1
    reader = opened(campaign)
    with pytest.raises(WeightsError, match=r"version 2 .* tensor 'b' has checksum"), reader.read_version(2):
        pass
    assert content(reader, 1) == {1}


def test_tensors_are_checked_once_on_a_node(campaign: CampaignDir, monkeypatch: pytest.MonkeyPatch) -> None:
    put(made(campaign), 1)
    assert content(opened(campaign), 1) == {1}

    def refuse(*_: object) -> bytes:
        raise AssertionError("checked again")

    monkeypatch.setattr(windows, "compute_checksum", refuse)
    assert content(opened(campaign), 1) == {1}


def test_a_check_that_was_started_and_never_finished_is_done_by_the_next_reader(
    campaign: CampaignDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(made(campaign), 1)
    reader = opened(campaign)
    monkeypatch.setattr(windows, "compute_checksum", lambda *_: b"")
    with pytest.raises(WeightsError), reader.read_version(1):
        pass
    monkeypatch.undo()
    assert content(reader, 1) == {1}


# ---- readers and the writer


def test_the_writer_waits_for_a_reader_of_the_slot_it_needs(campaign: CampaignDir) -> None:
    import threading

    writer, reader = made(campaign), opened(campaign)
    put(writer, 1)
    put(writer, 2)
    done = threading.Event()
    with reader.read_version(1) as slot:
        thread = threading.Thread(target=lambda: (put(writer, 3), done.set()))
        thread.start()
        assert not done.wait(0.2)
        assert set(bytes(slot)) == {1}
    thread.join()
    assert reader.versions() == [2, 3]


def test_a_reader_that_the_writer_did_not_wait_for_gets_an_error(
    campaign: CampaignDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windows, "LEASE_TIMEOUT_S", 0.05)
    writer, reader = made(campaign), opened(campaign)
    put(writer, 1)
    put(writer, 2)
    with pytest.raises(WeightsError, match="overwritten while it was read"), reader.read_version(1):
        put(writer, 3)
    assert content(reader, 3) == {3}


def test_a_version_being_overwritten_cannot_be_opened_for_reading(campaign: CampaignDir) -> None:
    writer, reader = made(campaign), opened(campaign)
    put(writer, 1)
    put(writer, 2)
    state = reader._state_of(1)
    writer.start_version(3, step=3)
    monkey = pytest.MonkeyPatch()
    monkey.setattr(reader, "_state_of", lambda version: state)  # read just before the writer started
    with pytest.raises(WeightsError, match="is being overwritten"), reader.read_version(1):
        pass
    monkey.undo()


def test_what_a_reader_maps_cannot_be_written_by_it(campaign: CampaignDir) -> None:
    put(made(campaign), 1)
    with opened(campaign).read_version(1) as slot, pytest.raises(TypeError):
        slot[0] = 1


def test_a_header_read_half_old_half_new_counts_as_no_version(campaign: CampaignDir) -> None:
    writer, reader = made(campaign), opened(campaign)
    put(writer, 1)
    put(writer, 2)
    slot = reader._state_of(2).slot
    for offset in (8, 16, 24, 33):
        at = SLOT_HEAD_OFFSETS[slot] + offset
        before = writer._heads.head[at]
        writer._heads.head[at] = before ^ 1
        assert newest(reader) == 1
        writer._heads.head[at] = before
    assert newest(reader) == 2


# ---- processes that end


def child(work: Callable[..., None], *args: Any) -> Any:
    process = RANK_SERVER.Process(target=work, args=args)
    process.start()
    return process


def stopped_in_mid_write(root: Path, reached: Event) -> None:
    campaign = CampaignDir(root)
    writer = made(campaign)
    put(writer, 1)
    writer.start_version(2, step=2)[: LAYOUT.nbytes // 2] = b"\xee" * (LAYOUT.nbytes // 2)
    reached.set()
    time.sleep(600)


def test_a_writer_killed_in_mid_write_leaves_the_other_version_and_its_successor_continues(
    campaign: CampaignDir,
) -> None:
    reached = RANK_SERVER.Event()
    process = child(stopped_in_mid_write, campaign.root, reached)
    assert reached.wait(60)
    reader = opened(campaign)
    process.kill()
    process.join()
    assert content(reader, 1) == {1}
    writer = made(campaign)
    assert newest(writer) == 1
    with pytest.raises(WeightsError, match="never go back"):
        writer.start_version(1, step=1)
    put(writer, 2)
    assert reader.is_current()
    assert content(reader, 2) == {2}


def test_a_second_writer_on_a_node_is_refused_while_the_first_is_alive(campaign: CampaignDir) -> None:
    reached = RANK_SERVER.Event()
    process = child(stopped_in_mid_write, campaign.root, reached)
    assert reached.wait(60)
    with pytest.raises(WeightsError, match=f"made by {process.pid}"):
        made(campaign)
    process.kill()
    process.join()


def holds_a_version(root: Path, reached: Event) -> None:
    with opened(CampaignDir(root)).read_version(1):
        reached.set()
        time.sleep(600)


def test_a_closed_writer_is_followed_also_while_its_memory_is_still_in_use(campaign: CampaignDir) -> None:
    first = made(campaign)
    still_mapped = first.start_version(1, step=1)
    first.close()
    second = made(campaign)
    put(second, 2)
    assert newest(second) == 2
    del still_mapped


def test_a_reader_killed_while_it_loads_does_not_hold_up_the_writer(campaign: CampaignDir) -> None:
    writer = made(campaign)
    put(writer, 1)
    put(writer, 2)
    reached = RANK_SERVER.Event()
    process = child(holds_a_version, campaign.root, reached)
    assert reached.wait(60)
    process.kill()
    process.join()
    put(writer, 3)
    assert newest(writer) == 3


def reads_until(root: Path, last: int, seed: int, answers: Any) -> None:
    """Read whatever is newest, at odd moments, until the last version; report what was read."""
    dice, campaign, seen, overtaken = random.Random(seed), CampaignDir(root), [], 0
    store = WindowStore(key(campaign), job=campaign.job(0))
    deadline = time.monotonic() + 100
    while (not seen or seen[-1] < last) and time.monotonic() < deadline:
        time.sleep(dice.random() * 0.004)
        manifest = store.newest()
        if manifest is None or (seen and manifest.version == seen[-1]):
            continue
        try:
            with store.read_version(manifest.version) as tensors:
                got = {float(value) for tensor in tensors.values() for value in tensor.flatten().unique()}
                time.sleep(dice.random() * 0.004)
                got |= {float(value) for tensor in tensors.values() for value in tensor.flatten().unique()}
        except WeightsError:
            overtaken += 1
            continue
        if got != {float(manifest.version)}:
            answers.put(f"version {manifest.version} held {got}")
            return
        seen.append(manifest.version)
    answers.put("went back" if seen != sorted(set(seen)) else seen[-1])


@pytest.mark.parametrize("seed", [1, 2])
def test_no_reader_ever_sees_a_mixed_version(campaign: CampaignDir, seed: int) -> None:
    last, dice = 200, random.Random(seed)
    answers = RANK_SERVER.Queue()
    readers = [child(reads_until, campaign.root, last, seed * 10 + i, answers) for i in range(4)]
    store = WindowStore(key(campaign), job=campaign.job(0))
    for version in range(last + 1):
        tensors = {name: torch.full((n,), float(version)) for name, n in (("a", 5000), ("b", 70), ("c", 1))}
        store.publish(tensors, WeightVersion(version=version, step=version))
        time.sleep(dice.random() * 0.004)
    assert [answers.get(timeout=120) for _ in readers] == [last] * 4
    for reader in readers:
        reader.join()


# ---- names, owners, memory


def test_a_window_is_private(campaign: CampaignDir) -> None:
    made(campaign)
    assert key(campaign).path.stat().st_mode & 0o777 == 0o600
    assert key(campaign).path.parent == SHARED_MEMORY


def test_a_file_that_others_can_read_is_not_trusted(campaign: CampaignDir) -> None:
    made(campaign).close()
    key(campaign).path.chmod(0o644)
    with pytest.raises(WeightsError, match="must be ours with 600"):
        made(campaign)
    assert Window.open(key(campaign)) is None
    key(campaign).path.unlink()


def test_a_link_in_place_of_a_window_is_not_followed(campaign: CampaignDir, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    key(campaign).path.symlink_to(victim)
    with pytest.raises(WeightsError, match="another user has this name"):
        made(campaign)
    assert Window.open(key(campaign)) is None
    assert victim.read_text() == "precious"
    key(campaign).path.unlink()


def test_campaigns_nodes_and_homes_have_separate_windows(tmp_path: Path) -> None:
    runs = [CampaignDir(tmp_path / home / name) for home in ("x", "y") for name in ("one", "two")]
    paths = {key(campaign, node).path for campaign in runs for node in ("n1", "n2")}
    assert len(paths) == 8


def test_two_campaigns_on_one_host_do_not_meet(tmp_path: Path) -> None:
    runs = [CampaignDir(tmp_path / name) for name in ("one", "two")]
    for number, campaign in enumerate(runs, start=1):
        put(made(campaign), number)
    assert [newest(opened(campaign)) for campaign in runs] == [1, 2]
    assert unlink_recorded_windows(runs[0].job(0)) == [key(runs[0]).path.name]
    assert newest(opened(runs[1])) == 2
    unlink_recorded_windows(runs[1].job(0))


def test_a_window_of_an_earlier_job_is_not_read_and_is_replaced(campaign: CampaignDir) -> None:
    old = made(campaign, job=0)
    put(old, 7)
    old.close()
    assert Window.open(key(campaign), job=1) is None
    reader = opened(campaign, job=0)
    new = made(campaign, job=1)
    assert not reader.is_current()
    assert newest(new) is None
    assert newest(reader) == 7, "a process that has it mapped keeps it"


def test_a_reader_finds_the_window_that_replaced_its_own(campaign: CampaignDir) -> None:
    reader = WindowStore(key(campaign), job=campaign.job(0))
    assert reader.newest() is None
    first = WindowStore(key(campaign), job=campaign.job(0))
    first.publish({"a": torch.ones(3)}, WeightVersion(version=1, step=1))
    assert float(reader.load(1)["a"][0]) == 1.0
    first.close()
    second = WindowStore(key(campaign), job=campaign.job(0))
    second.publish({"a": torch.ones(5)}, WeightVersion(version=2, step=2))
    assert reader.load(2)["a"].shape == (5,)


def test_a_window_of_another_layout_is_replaced(campaign: CampaignDir) -> None:
    old = made(campaign)
    put(old, 7)
    old.close()
    other = TensorLayout.pack([("a", "float32", (5,))])
    assert made(campaign, layout=other).layout == other


@pytest.mark.parametrize("garbage", [b"", b"hpcrlWN1", os.urandom(5000), b"hpcrlWN1" + b"\xff" * 9000])
def test_garbage_under_the_name_is_not_a_window_and_is_replaced(campaign: CampaignDir, garbage: bytes) -> None:
    key(campaign).path.write_bytes(garbage)
    key(campaign).path.chmod(0o600)
    assert Window.open(key(campaign)) is None
    put(made(campaign), 1)
    assert newest(opened(campaign)) == 1


def test_a_truncated_window_is_not_a_window(campaign: CampaignDir) -> None:
    put(made(campaign), 1)
    with key(campaign).path.open("r+b") as file:
        file.truncate(windows.mmap.PAGESIZE * 2)
    assert Window.open(key(campaign)) is None


def test_memory_that_is_short_is_an_error_with_numbers_and_leaves_nothing(campaign: CampaignDir) -> None:
    large = TensorLayout.pack([("a", "float32", (1 << 20,))])
    with largest_file(1 << 20), pytest.raises(WeightsError, match=r"no window of 8\.0 MiB .*MiB are free.*by files"):
        made(campaign, layout=large)
    assert list(SHARED_MEMORY.glob(f"{key(campaign).path.name}*")) == []


@pytest.mark.skipif(os.getuid() != 0, reason="mounts a small tmpfs, which only root may")
def test_full_shared_memory_is_an_error_and_not_a_signal(campaign: CampaignDir, tmp_path: Path) -> None:
    small = tmp_path / "shm"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.decode()}")
    try:
        store = WindowStore(WindowKey(campaign=campaign.root, node="n", directory=small), job=campaign.job(0))
        with pytest.raises(WeightsError, match="No space left on device"):
            store.publish({"a": torch.ones(1 << 20)}, WeightVersion(version=0, step=0))
        assert list(small.iterdir()) == []
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_what_killed_processes_left_is_removed_by_the_records_of_their_job(campaign: CampaignDir) -> None:
    reached = RANK_SERVER.Event()
    process = child(stopped_in_mid_write, campaign.root, reached)
    assert reached.wait(60)
    key(campaign).path.with_name(key(campaign).path.name + ".new").touch(mode=0o600)  # killed while it created another
    process.kill()
    process.join()
    assert unlink_recorded_windows(campaign.job(0)) == [key(campaign).path.name]
    assert list(SHARED_MEMORY.glob(f"{key(campaign).path.name}*")) == []
    assert unlink_recorded_windows(campaign.job(0)) == []


def test_a_window_whose_writer_was_killed_before_it_had_its_name_is_removed_too(campaign: CampaignDir) -> None:
    made(campaign).close()
    key(campaign).path.rename(key(campaign).path.with_name(key(campaign).path.name + ".new"))
    assert unlink_recorded_windows(campaign.job(0)) == [key(campaign).path.name]
    assert list(SHARED_MEMORY.glob(f"{key(campaign).path.name}*")) == []


def test_a_record_removes_nothing_but_windows(tmp_path: Path) -> None:
    job = JobDir(tmp_path / "jobs" / "000")
    job.windows.mkdir(parents=True)
    victim = tmp_path / "hpcrl-victim"
    victim.write_text("precious")
    (job.windows / "hpcrl-other").write_text(str(victim))
    (job.windows / "hpcrl-torn").write_text("")
    assert unlink_recorded_windows(job) == []
    assert victim.exists()


def test_the_guardian_can_clean_up_without_heavy_imports() -> None:
    code = "import sys, hpcrl.job.guardian; print(sorted({'torch', 'numpy', 'parsl'} & set(sys.modules)))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


# ---- the window as a store


def test_what_was_summed_while_it_was_copied_is_not_checked_again(
    campaign: CampaignDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    WindowStore(key(campaign), job=campaign.job(0)).publish({"a": torch.ones(3)}, WeightVersion(version=1, step=1))

    def refuse(*_: object) -> bytes:
        raise AssertionError("checked again")

    monkeypatch.setattr(windows, "compute_checksum", refuse)
    with WindowStore(key(campaign), job=campaign.job(0)).read_version(1) as tensors:
        assert tensors["a"].tolist() == [1.0] * 3


@pytest.mark.parametrize("kind", ["contiguous", "transposed", "empty"])
def test_what_is_staged_has_the_checksum_that_readers_compute(campaign: CampaignDir, kind: str) -> None:
    """The tensor is larger than the chunks that it is copied in."""
    values = torch.arange(3 * ROUNDING_CHUNK_BYTES // 4 + 1, dtype=torch.float32)[: None if kind != "empty" else 0]
    tensor = torch.stack([values, -values]).T if kind == "transposed" else values
    manifest = WindowStore(key(campaign), job=campaign.job(0)).publish({"a": tensor}, WeightVersion(version=1, step=1))
    assert manifest.checksums["a"] == xxhash.xxh3_128_hexdigest(tensor.contiguous().numpy().tobytes())
    assert torch.equal(WindowStore(key(campaign), job=campaign.job(0)).load(1)["a"], tensor)


def test_a_model_that_changes_its_tensors_is_refused_by_name(campaign: CampaignDir) -> None:
    store = WindowStore(key(campaign), job=campaign.job(0))
    store.publish({"a": torch.ones(3), "b": torch.ones(2)}, WeightVersion(version=0, step=0))
    for tensors, complaint in (
        ({"a": torch.ones(3)}, "'b'"),
        ({"a": torch.ones(3), "b": torch.ones(2), "c": torch.ones(1)}, "'c'"),
        ({"a": torch.ones(3), "b": torch.ones(2).half()}, "'b' is float32"),
        ({"a": torch.ones(4), "b": torch.ones(2)}, "'a' is float32"),
    ):
        with pytest.raises(WeightsError, match=complaint):
            store.publish(tensors, WeightVersion(version=1, step=1))
    assert store.newest() is not None
    assert float(store.load(0)["b"][0]) == 1.0


def test_the_newest_of_window_and_files_is_returned_and_each_is_read_where_it_is_stored(campaign: CampaignDir) -> None:
    window, files = WindowStore(key(campaign), job=campaign.job(0)), FileStore(campaign.weights)
    both = NewestSource(window, files)
    assert both.newest() is None
    files.publish({"a": torch.zeros(2)}, WeightVersion(version=0, step=0))
    window.publish({"a": torch.ones(2)}, WeightVersion(version=1, step=1))
    manifest = both.newest()
    assert manifest is not None
    assert manifest.version == 1
    assert [float(both.load(version)["a"][0]) for version in (0, 1)] == [0.0, 1.0]
    files.publish({"a": torch.full((2,), 2.0)}, WeightVersion(version=2, step=2))
    with both.read_version(2) as tensors:
        assert float(tensors["a"][0]) == 2.0


def test_a_reader_that_has_seen_a_version_can_read_it_after_the_trainers_end(campaign: CampaignDir) -> None:
    trainer = WindowStore(key(campaign), job=campaign.job(0))
    trainer.publish({"a": torch.ones(2)}, WeightVersion(version=1, step=1))
    reader = WindowStore(key(campaign), job=campaign.job(0))
    assert reader.newest() is not None
    trainer.unlink()
    trainer.close()
    with reader.read_version(1) as tensors:
        assert float(tensors["a"][0]) == 1.0
    reader.check_version(1)
    with pytest.raises(WeightsError, match="version 2 is not available"):
        reader.load(2)
    assert reader.newest() is None


def test_a_reader_may_leave_the_pages_of_a_large_window_unmapped_until_it_reads(campaign: CampaignDir) -> None:
    writer = made(campaign, layout=LARGE)
    put(writer, 1)
    writer.close()

    def faults(touch: bool) -> tuple[int, int]:
        """Count page faults of opening the window, and of the first access to every page."""
        start = num_faults()
        window = Window.open(key(campaign), touch=touch)
        assert window is not None
        opened = num_faults()
        with window.read_version(1) as slot:
            assert set(bytes(slot[:: mmap.PAGESIZE])) == {1}
        looked = num_faults()
        window.close()
        return opened - start, looked - opened

    (early_open, early_look), (late_open, late_look) = faults(touch=True), faults(touch=False)
    assert early_look < late_look / 8
    assert late_open < early_open / 8


def num_faults() -> int:
    """Return the number of page faults of this thread."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
