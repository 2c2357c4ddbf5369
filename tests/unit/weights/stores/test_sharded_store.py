"""A trainer of several ranks fills one window: real processes connected by gloo."""

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed

from hpcrl.campaign_dir.event_log import EventLog
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.errors import WeightsError
from hpcrl.testing.ranks import RANK_SERVER
from hpcrl.testing.shards import split_tensor
from hpcrl.weights.layout import TensorLayout, TensorShard, make_whole_shard
from hpcrl.weights.stores import sharded_store as shards_module
from hpcrl.weights.stores.file_store import FileStore
from hpcrl.weights.stores.publisher import WeightPublisher
from hpcrl.weights.stores.sharded_store import LocalShards, ShardStore, make_all_gather
from hpcrl.weights.stores.window_store import WindowStore
from hpcrl.weights.versions import WeightVersion, find_newest_version, list_versions
from hpcrl.weights.window.file import WindowKey
from hpcrl.weights.window.window import Window
from tests.support.tensors import make_tensors

HIDDEN, KV = 64, 16
LAYOUT = TensorLayout.pack(
    [
        ("embed", "bfloat16", (50, HIDDEN)),
        ("0.q", "bfloat16", (HIDDEN, HIDDEN)),
        ("0.k", "bfloat16", (KV, HIDDEN)),
        ("0.v", "bfloat16", (KV, HIDDEN)),
        ("0.o", "bfloat16", (HIDDEN, HIDDEN)),
        ("1.q", "bfloat16", (HIDDEN, HIDDEN)),
        ("1.k", "bfloat16", (KV, HIDDEN)),
        ("1.v", "bfloat16", (KV, HIDDEN)),
        ("1.o", "bfloat16", (HIDDEN, HIDDEN)),
        ("norm", "float32", (HIDDEN,)),
        ("scale", "float32", ()),
    ]
)


def held_tp_pp(rank: int, version: int) -> LocalShards:
    """TP 2 x PP 2: ranks 0 and 1 have layer 0, ranks 2 and 3 have layer 1; q, k, v are one fused tensor of a rank."""
    place, all_of, stage, half = LAYOUT.tensors_by_name(), make_tensors(LAYOUT, version), rank // 2, rank % 2
    qkv = [split_tensor(place[f"{stage}.{name}"], axis=0, num_shards=2)[half] for name in "qkv"]
    fused = torch.cat([all_of[shard.name][shard.index] for shard in qkv])
    held = list(zip(qkv, fused.split([shard.shape[0] for shard in qkv]), strict=True))
    rows = [split_tensor(place[f"{stage}.o"], axis=1, num_shards=2)[half]]
    if stage == 0:
        rows.append(split_tensor(place["embed"], axis=0, num_shards=2)[half])
    elif half == 0:
        rows += [make_whole_shard(place["norm"]), make_whole_shard(place["scale"])]
    return held + [(shard, all_of[shard.name][shard.index]) for shard in rows]


def held_dp(rank: int, version: int) -> LocalShards:
    """Replicas: one rank writes them."""
    return (
        [(make_whole_shard(place), make_tensors(LAYOUT, version)[place.name]) for place in LAYOUT.tensors]
        if rank == 0
        else []
    )


def held_fsdp(rank: int, version: int) -> LocalShards:
    """Every tensor in rows over three ranks; the scalar is the first one's."""
    held = [split_tensor(place, axis=0, num_shards=3)[rank] for place in LAYOUT.tensors if place.shape]
    scalars = [make_whole_shard(place) for place in LAYOUT.tensors if not place.shape and rank == 0]
    return [(shard, make_tensors(LAYOUT, version)[shard.name][shard.index]) for shard in held + scalars]


def key(campaign: CampaignDir) -> WindowKey:
    return WindowKey(campaign=campaign.root, node="n", directory=campaign.root.parent)


Work = Callable[[ShardStore, int, CampaignDir], Any]


def rank_of(work: Work, root: Path, rank: int, world: int, port: int, answers: Any) -> None:
    """Run a rank: connect to the others, work, report the result."""
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    campaign = CampaignDir(root)
    store = ShardStore(key(campaign), job=campaign.job(0), layout=LAYOUT, rank=rank, all_gather=make_all_gather())
    try:
        answer = work(store, rank, campaign)
    except WeightsError as error:
        answer = f"refused: {error}"
    except RuntimeError:  # gloo, when another rank is gone
        answer = "left alone"
    answers.put((rank, answer))


def ranks(work: Work, campaign: CampaignDir, world: int, *, num_answers: int | None = None) -> dict[int, Any]:
    """Return the result of each of `world` ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    answers = RANK_SERVER.Queue()
    processes = [
        RANK_SERVER.Process(target=rank_of, args=(work, campaign.root, rank, world, port, answers))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    found = dict(answers.get(timeout=240) for _ in range(world if num_answers is None else num_answers))
    for process in processes:
        process.join(timeout=60)
        process.kill()
        process.join()
    return found


def seen(campaign: CampaignDir, version: int) -> bool:
    """Return True if this version is in the window, checked, with the expected values."""
    got = WindowStore(key(campaign), job=campaign.job(0)).load(version)
    return list(got) == list(make_tensors(LAYOUT, version)) and all(
        torch.equal(got[name], t) for name, t in make_tensors(LAYOUT, version).items()
    )


# ---- how ranks hold a model


def publish_three(held: Callable[[int, int], LocalShards], store: ShardStore, rank: int) -> Any:
    manifests = []
    for version in (1, 2, 5):
        store.stage(held(rank, version), WeightVersion(version=version, step=version))
        if rank == 0:
            manifests.append(store.commit())
    store.close()
    return [(manifest.version, len(manifest.checksums)) for manifest in manifests]


def with_tp_pp(store: ShardStore, rank: int, campaign: CampaignDir) -> Any:
    return publish_three(held_tp_pp, store, rank)


def with_dp(store: ShardStore, rank: int, campaign: CampaignDir) -> Any:
    return publish_three(held_dp, store, rank)


def with_fsdp(store: ShardStore, rank: int, campaign: CampaignDir) -> Any:
    return publish_three(held_fsdp, store, rank)


@pytest.mark.parametrize(("work", "world"), [(with_tp_pp, 4), (with_dp, 2), (with_fsdp, 3)])
def test_however_ranks_hold_a_model_the_window_holds_it_whole(campaign: CampaignDir, work: Work, world: int) -> None:
    answers = ranks(work, campaign, world)
    assert answers == {rank: [] for rank in range(world)} | {
        0: [(version, len(LAYOUT.tensors)) for version in (1, 2, 5)]
    }
    assert seen(campaign, 2)
    assert seen(campaign, 5)


# ---- errors are raised on all ranks, and nothing is visible


def wrong_then_right(store: ShardStore, rank: int, campaign: CampaignDir) -> Any:
    """Each wrong version is refused on every rank alike, and the right one after them is accepted."""
    complaints = []
    extra = (TensorShard(name="0.bias", start=(0,), shape=(2,)), torch.zeros(2))
    for change in (
        lambda held: held.pop(),
        lambda held: held.append(held_tp_pp(0, 2)[0]),
        lambda held: held.append(extra),
        lambda held: held.__setitem__(0, (held[0][0], held[0][1].double())),
        lambda held: held.__setitem__(0, (held[0][0], held[0][1][:, :-1])),
    ):
        held = list(held_tp_pp(rank, 2))
        if rank == 3:
            change(held)
        try:
            store.stage(held, WeightVersion(version=2, step=2))
            complaints.append("")
        except WeightsError as error:
            complaints.append(str(error))
    store.stage(held_tp_pp(rank, 3), WeightVersion(version=3, step=3))
    if rank == 0:
        store.commit()
    store.close()
    return complaints


def test_an_error_of_one_rank_is_raised_on_every_rank_with_the_tensor_and_the_rank(campaign: CampaignDir) -> None:
    before = WindowStore(key(campaign), job=campaign.job(0))
    before.publish(make_tensors(LAYOUT, 1), WeightVersion(version=1, step=1))
    before.close()
    answers = ranks(wrong_then_right, campaign, 4)
    assert len({tuple(complaints) for complaints in answers.values()}) == 1
    missing, twice, extra, dtype, shape = answers[0]
    assert "tensor '1.o'" in missing
    assert "held by no rank" in missing
    assert "tensor '0.q': rank 0 and rank 3 both hold" in twice
    assert "rank 3: a shard belongs to tensor '0.bias'" in extra
    assert "rank 3: tensor '1.q': a shard of bfloat16 [32, 64] at [32, 0] is expected, but float64" in dtype
    assert "rank 3: tensor '1.q'" in shape
    assert "bfloat16 [32, 63] was given" in shape
    assert WindowStore(key(campaign), job=campaign.job(0)).newest().version == 3  # type: ignore[union-attr]
    assert seen(campaign, 1)
    assert seen(campaign, 3)


def another_model(store: ShardStore, rank: int, campaign: CampaignDir) -> Any:
    other = TensorLayout.pack([("a", "float32", (rank + 1,))])
    held = [(make_whole_shard(other.tensors[0]), torch.zeros(rank + 1))]
    ShardStore(key(campaign), job=campaign.job(0), layout=other, rank=rank, all_gather=make_all_gather()).stage(
        held, WeightVersion(version=1, step=1)
    )


def test_ranks_with_different_models_are_refused(campaign: CampaignDir) -> None:
    answers = ranks(another_model, campaign, 2)
    assert set(answers.values()) == {"refused: rank 1 has a different layout from rank 0: do both hold the same model?"}


def no_memory(store: ShardStore, rank: int, campaign: CampaignDir) -> Any:
    nowhere = WindowKey(campaign=campaign.root, node="n", directory=campaign.root / "absent")
    ShardStore(nowhere, job=campaign.job(0), layout=LAYOUT, rank=rank, all_gather=make_all_gather()).stage(
        held_tp_pp(rank, 1), WeightVersion(version=1, step=1)
    )


def test_a_window_without_room_is_an_error_on_every_rank(campaign: CampaignDir) -> None:
    answers = ranks(no_memory, campaign, 4)
    assert len(answers) == 4
    assert all(answer.startswith("refused: rank 0: no window of") for answer in answers.values())


# ---- kills


def killed_in_mid_write(store: ShardStore, rank: int, campaign: CampaignDir) -> Any:
    publish_one(store, rank, version=1)
    fill = shards_module._fill_slot

    def fill_half_and_die(slot: memoryview, layout: TensorLayout, held: LocalShards) -> None:
        fill(slot, layout, held[:1])
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 2:
        shards_module._fill_slot = fill_half_and_die
    publish_one(store, rank, version=2)
    return "published"


def publish_one(store: ShardStore, rank: int, *, version: int) -> None:
    store.stage(held_tp_pp(rank, version), WeightVersion(version=version, step=version))
    if rank == 0:
        store.commit()


def again(store: ShardStore, rank: int, campaign: CampaignDir) -> Any:
    """The trainer after a restart."""
    before = store.newest() if rank == 0 else None
    publish_one(store, rank, version=3)
    store.close()
    return before.version if before is not None else None


def test_a_rank_killed_in_mid_write_leaves_the_old_version_and_the_next_trainer_continues(
    campaign: CampaignDir,
) -> None:
    answers = ranks(killed_in_mid_write, campaign, 4, num_answers=3)
    assert answers == dict.fromkeys((0, 1, 3), "left alone")
    reader = WindowStore(key(campaign), job=campaign.job(0))
    assert reader.newest().version == 1  # type: ignore[union-attr]
    assert seen(campaign, 1)
    assert ranks(again, campaign, 4)[0] == 1
    assert reader.newest().version == 3  # type: ignore[union-attr]
    assert seen(campaign, 3)


def one_killed_while_summing(store: ShardStore, rank: int, campaign: CampaignDir) -> Any:
    if rank == 1:
        Window.compute_checksums = lambda window, turn: (  # type: ignore[method-assign]
            window._heads.share_work("sum", turn.slot, turn.generation, lambda _: os.kill(os.getpid(), signal.SIGKILL))
        )
    store.stage(held_dp(rank, 1), WeightVersion(version=1, step=1))
    if rank == 1:
        store.close()
    return store.commit().version


def test_checksums_that_a_killed_rank_had_started_are_computed_by_rank_0(campaign: CampaignDir) -> None:
    assert ranks(one_killed_while_summing, campaign, 2, num_answers=1) == {0: 1}
    assert seen(campaign, 1)


def test_a_slot_is_not_given_away_while_a_rank_still_fills_it(
    campaign: CampaignDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcrl.weights.window.window.LEASE_TIMEOUT_S", 0.05)
    writer = Window.create(key(campaign), LAYOUT, job=campaign.job(0))
    writer.start_version(1, step=1)
    turn, part = writer.ticket(), Window.join(key(campaign), job=0)
    with part.joint_write(turn), pytest.raises(WeightsError, match="a rank still fills slot 0"):
        writer.start_version(1, step=1)
    writer.start_version(1, step=1)
    with pytest.raises(WeightsError, match="is not being written now"), part.joint_write(turn):
        pass


# ---- as the trainer's publisher


def published(store: ShardStore, rank: int, campaign: CampaignDir) -> Any:
    if rank != 0:
        for version in (1, 2):
            store.stage(held_tp_pp(rank, version), WeightVersion(version=version, step=version))
        store.close()
        return None
    events = EventLog(campaign.events / "train.jsonl", role="train")
    publisher = WeightPublisher(FileStore(campaign.weights), store, events=events, keep_versions=2)
    for version in (1, 2):
        publisher.publish(held_tp_pp(rank, version), WeightVersion(version=version, step=version))
    publisher.persist()
    publisher.close()
    return [find_newest_version(campaign.weights), list_versions(campaign.weights)]


def test_a_publisher_takes_shards_as_it_takes_tensors(campaign: CampaignDir) -> None:
    assert ranks(published, campaign, 4)[0] == [2, [1, 2]]
    got = FileStore(campaign.weights).load(2)
    assert all(torch.equal(got[name], tensor) for name, tensor in make_tensors(LAYOUT, 2).items())
    assert not key(campaign).path.exists()
