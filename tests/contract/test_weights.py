"""The contract of every WeightStore, and the faults that the file store survives."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.errors import WeightsError
from hpcrl.testing.memory import MemoryStore
from hpcrl.weights.model_update import check_fit, collect_parameters, copy_weights
from hpcrl.weights.stores.file_store import FileStore
from hpcrl.weights.stores.store import WeightStore
from hpcrl.weights.stores.window_store import WindowStore
from hpcrl.weights.versions import (
    WeightVersion,
    find_newest_manifest,
    list_versions,
    manifest_file,
    tensors_file,
    version_dir,
)
from hpcrl.weights.window.file import WindowKey

Weights = dict[str, torch.Tensor]


@pytest.fixture(params=["file", "memory", "window"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> WeightStore:
    match request.param:
        case "file":
            return FileStore(tmp_path / "weights")
        case "window":
            campaign = CampaignDir(tmp_path / "campaign")
            return WindowStore(WindowKey(campaign=campaign.root, node="n", directory=tmp_path), job=campaign.job(0))
        case _:
            return MemoryStore()


def weights(value: float = 1.0) -> Weights:
    return {"a": torch.full((3, 4), value), "b": torch.tensor([float("nan"), -0.0, value]).bfloat16()}


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_an_empty_store_has_no_newest(store: WeightStore) -> None:
    assert store.newest() is None


def test_a_version_comes_back_bit_for_bit(store: WeightStore) -> None:
    odd = {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3), "across": torch.arange(6.0).view(2, 3).t()}
    sent = weights() | odd
    store.publish(sent, WeightVersion(version=3, step=7))
    got = store.load(3)
    assert {name: (t.dtype, t.shape, bits(t)) for name, t in got.items()} == {
        name: (t.dtype, t.shape, bits(t)) for name, t in sent.items()
    }


def test_the_newest_manifest_is_what_publish_returned(store: WeightStore) -> None:
    store.publish(weights(), WeightVersion(version=0, step=0))
    manifest = store.publish(weights(2.0), WeightVersion(version=5, step=4))
    assert store.newest() == manifest
    assert (manifest.version, manifest.step, set(manifest.checksums)) == (5, 4, {"a", "b"})


def test_a_published_version_does_not_change_with_the_trainer(store: WeightStore) -> None:
    live = weights(1.0)
    store.publish(live, WeightVersion(version=1, step=1))
    live["a"].zero_()
    assert store.load(1)["a"].min() == 1.0


@pytest.mark.parametrize("version", [4, 5, -1])
def test_versions_never_go_back(store: WeightStore, version: int) -> None:
    store.publish(weights(), WeightVersion(version=5, step=1))
    with pytest.raises(WeightsError, match="never go back"):
        store.publish(weights(), WeightVersion(version=version, step=2))


def test_loading_an_unknown_version_lists_those_that_are_there(store: WeightStore) -> None:
    store.publish(weights(), WeightVersion(version=2, step=1))
    with pytest.raises(WeightsError, match=r"version 9 .*available: 2"):
        store.load(9)


def test_a_version_that_can_be_read_passes_the_check_and_one_that_was_removed_does_not(store: WeightStore) -> None:
    for version in (1, 2, 3):
        store.publish(weights(), WeightVersion(version=version, step=version))
    store.prune(keep=1)
    store.check_version(3)
    with pytest.raises(WeightsError, match="version 1"):
        store.check_version(1)


def test_pruning_keeps_the_newest_versions(store: WeightStore) -> None:
    for version in range(5):
        store.publish(weights(version), WeightVersion(version=version, step=version))
    store.prune(keep=2)
    assert [float(store.load(version)["a"][0, 0]) for version in (3, 4)] == [3.0, 4.0]
    with pytest.raises(WeightsError):
        store.load(2)


def test_pruning_never_drops_the_newest_version(store: WeightStore) -> None:
    store.publish(weights(), WeightVersion(version=1, step=1))
    store.prune(keep=0)
    assert store.newest() is not None


# ---- the file store


def flip_a_byte(directory: Path) -> None:
    path = tensors_file(directory, 1)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def cut_short(directory: Path) -> None:
    path = tensors_file(directory, 1)
    path.write_bytes(path.read_bytes()[:-5])


def garble_manifest(directory: Path) -> None:
    manifest_file(directory, 1).write_bytes(b'{"version": 1, "st')


def swap_versions(directory: Path) -> None:
    manifest_file(directory, 1).write_bytes(manifest_file(directory, 0).read_bytes())


def remove_tensors(directory: Path) -> None:
    tensors_file(directory, 1).unlink()


@pytest.mark.parametrize("damage", [flip_a_byte, cut_short, garble_manifest, swap_versions, remove_tensors])
def test_a_damaged_version_is_refused(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    store = FileStore(tmp_path)
    store.publish(weights(), WeightVersion(version=0, step=0))
    store.publish(weights(2.0), WeightVersion(version=1, step=1))
    damage(tmp_path)
    with pytest.raises(WeightsError):
        store.load(1)
    assert store.load(0)["a"].min() == 1.0


def test_a_flipped_bit_is_reported_by_the_tensor_it_is_in(tmp_path: Path) -> None:
    FileStore(tmp_path).publish({"only.weight": torch.ones(4)}, WeightVersion(version=1, step=0))
    flip_a_byte(tmp_path)
    with pytest.raises(WeightsError, match=r"'only\.weight' has checksum"):
        FileStore(tmp_path).load(1)


def test_what_a_killed_publisher_left_is_invisible_and_cleared_by_the_next(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.publish(weights(), WeightVersion(version=0, step=0))
    torn = tmp_path / ".v00000001.deadbeef.tmp"
    torn.mkdir()
    (torn / "model.safetensors").write_bytes(b"half")
    assert list_versions(tmp_path) == [0]
    store.publish(weights(), WeightVersion(version=1, step=1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v00000000", "v00000001"]


def test_a_directory_without_a_manifest_is_not_a_version(tmp_path: Path) -> None:
    FileStore(tmp_path).publish(weights(), WeightVersion(version=0, step=0))
    version_dir(tmp_path, 1).mkdir()
    (tmp_path / "notes.txt").write_text("not ours")
    newest = find_newest_manifest(tmp_path)
    assert newest is not None
    assert newest.version == 0


def test_weights_that_cannot_be_written_leave_nothing_behind(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    shared = torch.ones(4)
    with pytest.raises(WeightsError, match=r"version 0 .* cannot be written"):
        store.publish({"a": shared, "b": shared}, WeightVersion(version=0, step=0))
    assert list(tmp_path.iterdir()) == []


def test_versions_are_private_to_their_owner(tmp_path: Path) -> None:
    FileStore(tmp_path / "weights").publish(weights(), WeightVersion(version=0, step=0))
    paths = [tmp_path / "weights", *(tmp_path / "weights").rglob("*")]
    assert [path for path in paths if path.stat().st_mode & 0o077] == []


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        ("hpcrl.weights.versions", {"torch", "numpy", "xxhash"}),
        ("hpcrl.roles.serve, hpcrl.engines.vllm.engine, hpcrl.engines.sim.engine", {"torch", "transformers"}),
    ],
)
def test_processes_that_only_follow_versions_import_nothing_heavy(modules: str, heavy: set[str]) -> None:
    code = f"import sys, {modules}; print(sorted({heavy} & set(sys.modules)))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


# ---- weights against a model


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda w: w.pop("bias"), "lack tensor 'bias'"),
        (lambda w: w.update(more=torch.ones(1)), "hold tensor 'more'"),
        (lambda w: w.update(weight=torch.ones(3, 2)), r"'weight' has shape \(3, 2\), the model needs \(2, 3\)"),
        (lambda w: w.update(weight=torch.ones(2, 3).double()), "'weight' is torch.float64"),
    ],
)
def test_weights_that_do_not_fit_name_the_tensor_and_change_nothing(
    change: Callable[[Weights], object], complaint: str
) -> None:
    model = torch.nn.Linear(3, 2)
    before = {name: tensor.clone() for name, tensor in collect_parameters(model).items()}
    given = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
    change(given)
    with pytest.raises(WeightsError, match=complaint):
        copy_weights(model, given)
    assert all(torch.equal(tensor, before[name]) for name, tensor in collect_parameters(model).items())


def test_a_tied_parameter_is_published_once() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False))
    model[1].weight = model[0].weight
    assert list(collect_parameters(model)) == ["0.weight"]
    check_fit(collect_parameters(model), collect_parameters(model))
