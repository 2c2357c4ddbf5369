"""Windows of parts on two nodes, the parts as files, and the file that is assembled from them."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.errors import WeightsError
from hpcrl.testing.shards import split_tensor
from hpcrl.weights import tensor_file
from hpcrl.weights.layout import ITEM_SIZES, PartAssignment, TensorLayout, TensorShard, make_whole_shard
from hpcrl.weights.stores import part_files
from hpcrl.weights.stores.file_store import FileStore
from hpcrl.weights.stores.sharded_store import LocalShards, ShardStore
from hpcrl.weights.versions import WeightVersion, list_versions
from hpcrl.weights.window.file import WindowKey
from hpcrl.weights.window.window import Window
from tests.support.disks import largest_file
from tests.support.tensors import make_tensors

LAYOUT = TensorLayout.pack(
    [("q", "float32", (800, 6)), ("o", "bfloat16", (6, 80)), ("norm", "float32", ()), ("none", "int8", (0, 3))]
)
QUERY, OUT, NORM, _ = LAYOUT.tensors
HELD: list[list[TensorShard]] = [
    [split_tensor(QUERY, axis=0, num_shards=2)[0], split_tensor(OUT, axis=1, num_shards=2)[0], make_whole_shard(NORM)],
    [split_tensor(QUERY, axis=0, num_shards=2)[1], split_tensor(OUT, axis=1, num_shards=2)[1]],
]
PARTS = PartAssignment.from_shards(LAYOUT, nodes=("a", "b"), held_by_rank=HELD)


def held(rank: int, version: int) -> LocalShards:
    return [(shard, make_tensors(LAYOUT, version)[shard.name][shard.index]) for shard in HELD[rank]]


class PartTrainer:
    """Two ranks on two nodes, each a thread of this process."""

    def __init__(self, campaign: CampaignDir) -> None:
        self._barrier, self._messages = Barrier(2), [b"", b""]
        self._threads = ThreadPoolExecutor(2)
        self.stores = [
            ShardStore(
                WindowKey(campaign=campaign.root, node=node, directory=campaign.root.parent, part=True),
                job=campaign.job(0),
                layout=LAYOUT,
                rank=rank,
                all_gather=self._exchange(rank),
                parts=PARTS,
            )
            for rank, node in enumerate("ab")
        ]
        self.together(lambda store, rank: store.find_earlier_versions())

    def together(self, do: Callable[[ShardStore, int], Any]) -> list[Any]:
        """Return the result of each rank's call, or its error."""
        calls = [self._threads.submit(do, store, rank) for rank, store in enumerate(self.stores)]
        return [call.exception(timeout=60) or call.result() for call in calls]

    def publish(self, version: int) -> None:
        self.together(
            lambda store, rank: store.stage(held(rank, version), WeightVersion(version=version, step=version))
        )
        self.stores[0].commit()

    def end(self) -> None:
        for store in self.stores:
            store.close()
        self._threads.shutdown()

    def _exchange(self, rank: int) -> Callable[[bytes], list[bytes]]:
        def exchange(message: bytes) -> list[bytes]:
            self._messages[rank] = message
            self._barrier.wait(60)
            received = list(self._messages)
            self._barrier.wait(60)
            return received

        return exchange


@pytest.fixture
def trainer(campaign: CampaignDir) -> Iterator[PartTrainer]:
    trainer = PartTrainer(campaign)
    yield trainer
    trainer.end()


def left(campaign: CampaignDir, trainer: PartTrainer, version: int) -> tuple[Callable[[], object], Path]:
    """Return what writes the version to a file, and the directory where the other node has written its part."""
    directory = part_files.make_parts_directory(campaign.weights)
    trainer.stores[1].write_part(version, directory)
    trainer.stores[1].close()  # waits for it
    files = FileStore(campaign.weights)
    return trainer.stores[0].make_gatherer(
        files, WeightVersion(version=version, step=version), directory=directory
    ), directory


def test_each_node_has_its_part_alone_and_the_file_has_everything(campaign: CampaignDir, trainer: PartTrainer) -> None:
    for version in (1, 2):
        trainer.publish(version)
    gather, directory = left(campaign, trainer, 2)
    assert (directory / "rank-1" / "window.bin").stat().st_size == PARTS.layouts["b"].nbytes < LAYOUT.nbytes
    gather()
    got = FileStore(campaign.weights).load(2)
    assert list(got) == list(make_tensors(LAYOUT, 2))
    assert all(torch.equal(got[name], tensor) for name, tensor in make_tensors(LAYOUT, 2).items())
    assert [path.name for path in campaign.weights.iterdir()] == ["v00000002"]
    assert {oct(path.stat().st_mode & 0o077) for path in campaign.weights.rglob("*")} == {"0o0"}


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (flip, r"shard 'q@400,0' has checksum .* it is damaged"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "it is truncated"),
    ],
)
def test_a_part_that_has_changed_makes_no_version(
    campaign: CampaignDir, trainer: PartTrainer, damage: Callable[[Path], object], complaint: str
) -> None:
    trainer.publish(1)
    gather, directory = left(campaign, trainer, 1)
    damage(directory / "rank-1" / "window.bin")
    with pytest.raises(WeightsError, match=complaint):
        gather()
    assert list_versions(campaign.weights) == []


def test_a_node_that_cannot_write_its_part_is_named(campaign: CampaignDir, trainer: PartTrainer) -> None:
    trainer.publish(1)
    with largest_file(1 << 12):
        gather, _ = left(campaign, trainer, 1)
    with pytest.raises(WeightsError, match=r"rank 1 cannot write its part: .*File too large"):
        gather()


def test_parts_of_a_killed_trainer_are_removed_by_the_next(campaign: CampaignDir, trainer: PartTrainer) -> None:
    trainer.publish(1)
    _, first = left(campaign, trainer, 1)
    second = part_files.make_parts_directory(campaign.weights)
    assert [path for path in campaign.weights.iterdir()] == [second]
    assert first != second


def test_a_version_that_one_node_alone_has_is_never_made_again(campaign: CampaignDir) -> None:
    first = PartTrainer(campaign)
    first.publish(1)
    first.together(lambda store, rank: store.stage(held(rank, 2), WeightVersion(version=2, step=2)))
    first.end()  # rank 0 was killed before it committed
    again = PartTrainer(campaign)
    assert again.stores[0].newest() is None
    assert again.stores[0].newest_started() == 2
    again.publish(3)
    newest = again.stores[0].newest()
    assert newest is not None
    assert newest.version == 3
    again.end()


def test_a_restarted_trainer_finds_the_version_that_all_nodes_have(campaign: CampaignDir) -> None:
    first = PartTrainer(campaign)
    first.publish(1)
    first.end()
    again = PartTrainer(campaign)
    newest = again.stores[0].newest()
    assert newest is not None
    assert (newest.version, again.stores[0].newest_started()) == (1, 1)
    again.end()


def test_ranks_that_hold_other_shards_than_at_the_start_are_refused_on_all_nodes(trainer: PartTrainer) -> None:
    swapped = trainer.together(lambda store, rank: store.stage(held(1 - rank, 1), WeightVersion(version=1, step=1)))
    assert ["other shards of the weights than at the start" in str(error) for error in swapped] == [True, True]


def test_no_engine_reads_the_window_of_a_part(campaign: CampaignDir, trainer: PartTrainer) -> None:
    trainer.publish(1)
    assert Window.open(WindowKey(campaign=campaign.root, node="a", directory=campaign.root.parent), job=0) is None
    part = Window.open(WindowKey(campaign=campaign.root, node="a", directory=campaign.root.parent, part=True), job=0)
    assert part is not None
    assert part.layout == PARTS.layouts["a"]
    part.close()


def test_a_file_written_tensor_by_tensor_is_read_by_safetensors(tmp_path: Path) -> None:
    layout = TensorLayout.pack((dtype, dtype, (2, 3)) for dtype in sorted(ITEM_SIZES))
    contents = [bytes(value % 2 for value in range(tensor.nbytes)) for tensor in layout.tensors]
    path = tmp_path / "all.safetensors"
    checksums = tensor_file.write_tensors(layout, map(memoryview, contents), path)
    got = load_file(path)
    assert got.keys() == checksums.keys() == ITEM_SIZES.keys()
    for tensor, data in zip(layout.tensors, contents, strict=True):
        assert got[tensor.name].dtype == getattr(torch, tensor.dtype)
        assert got[tensor.name].view(torch.uint8).numpy().tobytes() == data
