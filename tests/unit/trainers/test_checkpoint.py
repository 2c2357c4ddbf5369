"""Checkpoints: complete or absent, whatever happens while they are written."""

import json
import os
import random
import shutil
import signal
import stat
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from hpcrl.campaign_dir.checkpoints import CheckpointManifest, encode_manifest
from hpcrl.config.recipe import TrainConfig
from hpcrl.errors import LostCheckpointsError, TrainError
from hpcrl.learn.consumed import ConsumedTrajectories
from hpcrl.testing.learning import load_checkpoint, save_checkpoint
from hpcrl.testing.ranks import RANK_SERVER
from hpcrl.trainers.checkpoint import (
    PendingCheckpoint,
    commit_checkpoint,
    find_damage,
    find_newest,
    find_oldest_number,
    prune_checkpoints,
    read_checkpoint,
)
from hpcrl.trainers.state import WEIGHT_PART, fill_shards, make_whole_shard, read_whole_shapes
from hpcrl.trainers.torch import TorchTrainer
from tests.support.disks import largest_file
from tests.support.trajectories import make_trajectory


class Counter:
    """A trainer whose state is one number and some weight on disk."""

    def __init__(self, value=0, *, num_bytes=100):
        self.value = value
        self.num_bytes = num_bytes

    def train_step(self, trajectories, *, step, version):
        raise NotImplementedError

    def tensors(self):
        return {}

    def snapshot(self):
        return self

    def write(self, directory):
        (directory / "state.json").write_text(json.dumps(self.value))
        (directory / "shards").mkdir()
        (directory / "shards" / "0.bin").write_bytes(bytes(self.num_bytes))

    def load(self, directory):
        self.value = json.loads((directory / "state.json").read_text())


def saved(directory, *steps, **changed):
    """Save one checkpoint per step; its counter holds the step."""
    paths = []
    for step in steps:
        consumed = ConsumedTrajectories()
        consumed.update(f"math/{number}/0" for number in range(step))
        trainer = Counter(step, **changed)
        paths.append(save_checkpoint(directory, step=step, version=step + 100, trainer=trainer, consumed=consumed))
    return paths


def found(directory):
    """Find the newest intact checkpoint; return it with the reports of damaged ones."""
    reports = []
    path = find_newest(directory, report=lambda path, reason: reports.append((path, reason)))
    return path, reports


def test_a_checkpoint_brings_back_trainer_consumed_and_extra(tmp_path):
    consumed = ConsumedTrajectories()
    consumed.add("math/4/1")
    path = save_checkpoint(tmp_path, step=7, version=9, trainer=Counter(3), consumed=consumed, extra={"accepted": 12})
    trainer = Counter()
    manifest, known = load_checkpoint(path, trainer=trainer)
    assert (manifest.step, manifest.version, manifest.extra) == (7, 9, {"accepted": 12})
    assert trainer.value == 3
    assert "math/4/0" in known
    assert "math/5/0" not in known


def test_no_checkpoint_is_found_before_the_first(tmp_path):
    assert found(tmp_path) == (None, [])
    assert found(tmp_path / "absent") == (None, [])


def test_the_newest_commit_counts_even_if_its_step_is_lower(tmp_path):
    _, last = saved(tmp_path, 20, 15)
    assert found(tmp_path) == (last, [])


def test_the_ten_millionth_checkpoint_is_newer_than_the_one_before(tmp_path):
    (path,) = saved(tmp_path, 1)
    path.rename(tmp_path / "999999-step-000001")
    (last,) = saved(tmp_path, 2)
    assert last.name == "1000000-step-000002"
    assert found(tmp_path) == (last, [])


def test_only_its_owner_can_read_a_checkpoint(tmp_path):
    (path,) = saved(tmp_path / "checkpoints", 1)
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in (path.parent, path)] == [0o700, 0o700]


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def empty(path):
    path.write_bytes(b"")


@pytest.mark.parametrize("harm", [cut, flip, empty, Path.unlink])
@pytest.mark.parametrize("name", ["state.json", "shards/0.bin", "consumed.json", "checkpoint.json"])
def test_a_damaged_checkpoint_is_reported_and_the_older_one_used(tmp_path, harm, name):
    older, last = saved(tmp_path, 1, 22)
    harm(last / name)
    path, reports = found(tmp_path)
    assert path == older
    [(reported, reason)] = reports
    assert reported == last
    assert Path(name).name in reason


def test_any_flipped_bit_of_the_manifest_is_detected(tmp_path):
    (path,) = saved(tmp_path, 5)
    manifest = path / "checkpoint.json"
    original = manifest.read_bytes()
    for index in range(0, len(original), 3):
        changed = bytearray(original)
        changed[index] ^= 1
        manifest.write_bytes(changed)
        assert find_damage(path) is not None, f"byte {index}: {original[index : index + 1]!r}"


def test_a_checkpoint_of_a_newer_format_is_named_as_such(tmp_path):
    (path,) = saved(tmp_path, 5)
    text = (path / "checkpoint.json").read_text()
    (path / "checkpoint.json").write_text(text.replace('"format": 1', '"format": 2'))
    assert "format 2 is newer than this hpcrl reads (1): update hpcrl" in find_damage(path)


def test_no_older_checkpoint_replaces_one_of_a_newer_format(tmp_path):
    _, newest = saved(tmp_path, 5, 6)
    text = (newest / "checkpoint.json").read_text()
    (newest / "checkpoint.json").write_text(text.replace('"format": 1', '"format": 2'))
    with pytest.raises(LostCheckpointsError, match=r"000006 was saved by a newer hpcrl: format 2 .* update"):
        found(tmp_path)


def test_fields_that_a_newer_version_has_added_are_skipped(tmp_path):
    class NewerManifest(CheckpointManifest, frozen=True, kw_only=True):
        added_later: int = 1

    (path,) = saved(tmp_path, 5)
    manifest, _ = read_checkpoint(path)
    fields = {name: getattr(manifest, name) for name in manifest.__struct_fields__}
    (path / "checkpoint.json").write_bytes(encode_manifest(NewerManifest(**fields)))
    assert b"added_later" in (path / "checkpoint.json").read_bytes()
    assert found(tmp_path) == (path, [])


def test_training_does_not_start_again_when_every_checkpoint_is_damaged(tmp_path):
    for path in saved(tmp_path, 1, 2):
        cut(path / "state.json")
    with pytest.raises(
        LostCheckpointsError, match=r"every checkpoint in .* is damaged .*state.json: has 0 bytes, had 1"
    ):
        found(tmp_path)


def test_a_full_disk_is_an_error_that_names_the_path_and_spares_the_older_checkpoint(tmp_path):
    (older,) = saved(tmp_path, 1)
    refused = pytest.raises(
        TrainError, match=r"000002-step-000002 could not be saved .*File too large.*older .* untouched"
    )
    with refused, largest_file(1 << 16):
        saved(tmp_path, 2, num_bytes=1 << 17)
    assert list(tmp_path.iterdir()) == [older]
    assert found(tmp_path) == (older, [])


def test_a_full_disk_under_the_torch_trainer_is_the_same_error(tmp_path, model_dir):
    trainer, consumed, _ = resumed(model_dir, tmp_path)
    older = save_checkpoint(tmp_path, step=1, version=1, trainer=trainer, consumed=consumed)
    reason = r"000002-step-000002 could not be saved .*state-00000.safetensors.*too large"
    with pytest.raises(TrainError, match=reason), largest_file(1000):
        save_checkpoint(tmp_path, step=2, version=2, trainer=trainer, consumed=consumed)
    assert list(tmp_path.iterdir()) == [older]
    assert found(tmp_path) == (older, [])


def test_pruning_keeps_the_newest(tmp_path):
    paths = saved(tmp_path, 1, 2, 3, 4)
    assert prune_checkpoints(tmp_path, keep=2) == paths[:2]
    assert sorted(tmp_path.iterdir()) == paths[2:]


def test_pruning_does_not_count_damaged_checkpoints_as_kept(tmp_path):
    paths = saved(tmp_path, 1, 2, 3, 4)
    cut(paths[2] / "state.json")
    assert prune_checkpoints(tmp_path, keep=2) == paths[:1]
    cut(paths[3] / "state.json")
    assert found(tmp_path)[0] == paths[1]


def test_pruning_fewer_than_asked_for_removes_nothing(tmp_path):
    paths = saved(tmp_path, 1, 2)
    assert prune_checkpoints(tmp_path, keep=3) == []
    assert sorted(tmp_path.iterdir()) == paths


def test_the_best_are_kept_besides_the_newest(tmp_path):
    for step, reward in enumerate([0.1, 0.9, None, 0.5, 0.2, 0.3]):
        save_checkpoint(
            tmp_path,
            step=step,
            version=step,
            trainer=Counter(),
            consumed=ConsumedTrajectories(),
            extra={"reward": reward},
        )
    prune_checkpoints(tmp_path, keep=2, keep_best=1)
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        "000002-step-000001",
        "000005-step-000004",
        "000006-step-000005",
    ]
    # What the older ones needed of the spool may go: no campaign resumes from one that is kept as the best.
    assert find_oldest_number(tmp_path, keep=2) == 5


def test_the_oldest_to_resume_from_is_the_first_while_fewer_than_asked_for_are_saved(tmp_path):
    assert find_oldest_number(tmp_path, keep=2) is None
    saved(tmp_path, 1)
    assert find_oldest_number(tmp_path, keep=2) == 1


def test_a_pending_checkpoint_is_committed_as_it_was_captured(tmp_path):
    consumed = ConsumedTrajectories()
    consumed.add("math/1/0")
    pending = PendingCheckpoint(step=1, version=1, state=Counter(1), consumed=consumed.encode(), extra={})
    consumed.add("math/2/0")
    _, known = load_checkpoint(commit_checkpoint(tmp_path, pending), trainer=Counter())
    assert "math/1/0" in known
    assert "math/2/0" not in known


def test_pruning_removes_the_leftovers_of_killed_savers(tmp_path):
    (path,) = saved(tmp_path, 1)
    shutil.copytree(path, tmp_path / ".000002-step-000002.0123456789ab.tmp")
    prune_checkpoints(tmp_path, keep=1)
    assert list(tmp_path.iterdir()) == [path]


# The torch trainer's own files: of the best only the weights are kept, and moments may be rounded.


def train_steps(model_dir, directory, *, num_steps, **changed):
    """Train from the newest checkpoint on, with one after each step; return the trainer."""
    torch.set_num_threads(1)
    settings = TrainConfig(num_steps=1000, groups_per_step=1, learning_rate=1e-2, **changed)
    trainer = TorchTrainer(Path(model_dir), settings, seed=1)
    path = find_newest(directory, report=refuse_damage)
    first = 0 if path is None else load_checkpoint(path, trainer=trainer)[0].step
    for step in range(first, first + num_steps):
        trainer.train_step(trajectories_of(step), step=step, version=step)
        save_checkpoint(
            directory,
            step=step + 1,
            version=step + 1,
            trainer=trainer,
            consumed=ConsumedTrajectories(),
            extra={"reward": -float(step)},
        )
    return trainer


def read_whole_tensors(directory):
    """Read the weights of a checkpoint."""
    shapes = {name: shape for (part, name), shape in read_whole_shapes(directory).items() if part == WEIGHT_PART}
    found = {name: torch.empty(shape) for name, shape in shapes.items()}
    fill_shards([make_whole_shard(name, tensor) for name, tensor in found.items()], directory)
    return found


def test_the_best_keep_their_weights_alone_and_are_never_resumed_from(tmp_path, model_dir):
    train_steps(model_dir, tmp_path, num_steps=4)
    best, _, *newest = sorted(tmp_path.iterdir())
    whole = read_whole_tensors(best)
    prune_checkpoints(tmp_path, keep=2, keep_best=1)
    assert sorted(tmp_path.iterdir()) == [best, *newest]
    assert sorted(path.name for path in best.iterdir()) == [
        "checkpoint.json",
        "consumed.json",
        "state-00000.safetensors",
    ]
    assert find_damage(best) is None
    kept = read_whole_tensors(best)
    assert all(torch.equal(kept[name], tensor) for name, tensor in whole.items())
    assert sum(path.stat().st_size for path in best.iterdir()) < 0.45 * sum(
        path.stat().st_size for path in newest[0].iterdir()
    )
    shutil.rmtree(newest[1])
    assert found(tmp_path) == (newest[0], [])
    cut(newest[0] / "state-00000.safetensors")
    with pytest.raises(LostCheckpointsError, match="every checkpoint in"):
        found(tmp_path)


def test_a_saver_that_is_killed_between_manifest_and_files_leaves_a_whole_checkpoint(tmp_path, model_dir, monkeypatch):
    train_steps(model_dir, tmp_path, num_steps=2)
    best = min(tmp_path.iterdir())

    def stop(path):
        raise KeyboardInterrupt(path)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", stop)
        with pytest.raises(KeyboardInterrupt):
            prune_checkpoints(tmp_path, keep=1, keep_best=1)
    assert find_damage(best) is None
    assert (best / "state-00000-moments.safetensors").exists()
    prune_checkpoints(tmp_path, keep=1, keep_best=1)
    assert not (best / "state-00000-moments.safetensors").exists()
    assert find_damage(best) is None


def test_rounded_moments_take_half_of_the_bytes_and_training_continues_from_them(tmp_path, model_dir):
    exact, rounded = tmp_path / "exact", tmp_path / "rounded"
    train_steps(model_dir, exact, num_steps=2)
    train_steps(model_dir, rounded, num_steps=2, moments_dtype="bfloat16")
    (mine, theirs) = (load_file(max(each.iterdir()) / "state-00000-moments.safetensors") for each in (rounded, exact))
    large = [key for key, tensor in theirs.items() if tensor.ndim]
    assert {mine[key].dtype for key in large} == {torch.bfloat16}
    assert all(torch.allclose(mine[key].float(), theirs[key], rtol=2**-7) for key in large)
    assert all(torch.equal(mine[key], theirs[key]) for key in theirs.keys() - set(large)), "counts of steps"
    weights = [read_whole_tensors(max(each.iterdir())) for each in (exact, rounded)]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    after = [
        train_steps(model_dir, each, num_steps=1, moments_dtype=dtype).tensors()
        for each, dtype in ((exact, "float32"), (rounded, "bfloat16"))
    ]
    for name, tensor in after[0].items():
        moved = (tensor - weights[0][name]).abs().mean()
        assert (after[1][name] - tensor).abs().mean() < 0.02 * moved, name


# SIGKILL: a child trains a real model and commits every step; it is killed at random moments and restarted.


def train_and_save(model_dir, directory, acknowledged, num_steps):
    """Resume, then train to `num_steps`; after each `save_checkpoint` one byte acknowledges the commit."""
    trainer, consumed, step = resumed(model_dir, directory)
    with Path(acknowledged).open("ab", buffering=0) as log:
        while step < num_steps:
            episodes = trajectories_of(step)
            assert not any(episode.id in consumed for episode in episodes)
            trainer.train_step(episodes, step=step, version=step)
            consumed.update(episode.id for episode in episodes)
            step += 1
            save_checkpoint(Path(directory), step=step, version=step, trainer=trainer, consumed=consumed)
            os.write(log.fileno(), bytes([step]))
            prune_checkpoints(Path(directory), keep=2)


def resumed(model_dir, directory):
    torch.set_num_threads(1)
    train = TrainConfig(num_steps=1000, groups_per_step=1, learning_rate=1e-2, num_minibatches=2)
    trainer = TorchTrainer(Path(model_dir), train, seed=1)
    path = find_newest(Path(directory), report=refuse_damage)
    if path is None:
        return trainer, ConsumedTrajectories(), 0
    manifest, consumed = load_checkpoint(path, trainer=trainer)
    return trainer, consumed, manifest.step


def refuse_damage(path, reason):
    raise AssertionError(f"a reader saw {path} damaged: {reason}")


def trajectories_of(step):
    """Make the trajectories of a step, always the same."""
    rng = np.random.default_rng(step)
    generated = np.arange(12) >= 5
    return [
        make_trajectory(
            f"math/{step}/{index}",
            seed=step,
            version=step,
            token_ids=rng.integers(0, 32, 12, dtype=np.int32),
            logprobs=np.where(generated, -3.4, 0.0),
            loss_mask=generated,
            turns=[],
            reward=float(index % 2),
        )
        for index in range(4)
    ]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    directory = tmp_path_factory.mktemp("model")
    Qwen2ForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def start_child(model_dir):
    """Start a child that trains into a directory, forked from a server that has already imported torch."""

    def start(directory, acknowledged, *, num_steps):
        arguments = (str(model_dir), str(directory), str(acknowledged), num_steps)
        child = RANK_SERVER.Process(target=train_and_save, args=arguments)
        child.start()
        return child

    return start


def wait_for_commits(log, child, *, more):
    """Wait until the child has acknowledged `more` commits."""
    wanted = log.stat().st_size + more
    while log.stat().st_size < wanted and child.is_alive():
        time.sleep(0.001)


@pytest.mark.parametrize(
    ("num_kills", "num_steps"), [(8, 40), pytest.param(60, 120, marks=[pytest.mark.long, pytest.mark.timeout(1800)])]
)
def test_training_killed_at_random_moments_ends_like_an_uninterrupted_run(
    tmp_path, start_child, model_dir, num_kills, num_steps
):
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    child = start_child(straight, tmp_path / "straight.log", num_steps=num_steps)
    child.join()
    assert child.exitcode == 0
    dice, log = random.Random(5), tmp_path / "killed.log"
    log.touch()
    for _ in range(num_kills):
        child = start_child(killed, log, num_steps=num_steps)
        wait_for_commits(log, child, more=dice.randint(0, num_steps // num_kills - 1))
        time.sleep(dice.uniform(0, 0.02))
        child.kill()
        child.join()
        assert child.exitcode == -signal.SIGKILL
        _, _, step = resumed(model_dir, killed)
        assert step >= (log.read_bytes() or b"\0")[-1], "a commit that was acknowledged is gone"
    child = start_child(killed, log, num_steps=num_steps)
    child.join()
    assert child.exitcode == 0
    last, expected = found(killed)[0], found(straight)[0]
    for name in ("state-00000.safetensors", "state-00000-moments.safetensors"):
        mine, theirs = load_file(last / name), load_file(expected / name)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    assert (last / "consumed.json").read_bytes() == (expected / "consumed.json").read_bytes()
