"""Power loss: a model of what a disk may hold when the machine goes dark, and campaigns that go on from there.

Recorder watches one tree while the calls that write are made through `os`. What was fsynced is there afterwards:
a file's bytes by fsync of the file, a directory's names by fsync of the directory. All else is chance, page by page
and name by name: as it was, or as it is. Only a rename within a directory is one thing, done or not done, as every
filesystem with a journal has it; most promise more.

The tree is looked at before each watched call, so that what HDF5 wrote by itself is seen too.
"""

import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from bench.crash.campaign import Consumer, Losses, Scorer, Writer, judge

_PAGE = 4096
_WATCHED = (
    *("open", "write", "writev", "pwrite", "pwritev"),
    *("fsync", "fdatasync", "rename", "replace", "unlink", "mkdir", "rmdir"),
)
_MEAN_TOKENS = 1200
_CHANCE = 0.15
"""That the power fails before a call."""


@dataclass
class _Node:
    """A file or a directory: as it is, and as it certainly is on the disk."""

    now: bytes | dict[str, int]
    durable: bytes | dict[str, int]


@dataclass
class Recorder:
    """What is and what is durable in the tree under `root`."""

    root: Path
    before_call: Callable[[], None] = lambda: None
    _one_at_a_time: Any = field(default_factory=threading.RLock)
    """Writers flush in threads: a call is made and seen before the next one."""
    _nodes: dict[int, _Node] = field(default_factory=dict)
    _numbers: dict[int, int] = field(default_factory=dict)
    """Inode numbers are used again; ours are not."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        self._look()
        for node in self._nodes.values():
            node.durable = node.now
        watched: dict[str, Any] = {name: self._watched(name) for name in _WATCHED}
        with mock.patch.multiple(os, **watched):
            yield

    def after_power_loss(self, target: Path, rng: random.Random) -> None:
        """Make `target` a tree that the disk may hold if the power fails now."""
        self._restore(self._numbers[self.root.stat().st_ino], target, rng)

    def _watched(self, name: str) -> Callable[..., Any]:
        call = getattr(os, name)

        def watched(*args: Any, **options: Any) -> Any:
            if not self._concerns(args[0], options.get("dir_fd")):
                return call(*args, **options)
            with self._one_at_a_time:
                self._look()
                self.before_call()
                result = call(*args, **options)
                if name in ("fsync", "fdatasync"):
                    self._look()
                    self._made_durable(os.fstat(args[0]).st_ino)
                return result

        return watched

    def _concerns(self, file: Any, directory: int | None) -> bool:
        """Return whether a file is in the tree; a copy of it is judged, by several threads, in the middle of a call."""
        path = Path(f"/proc/self/fd/{file}").readlink() if isinstance(file, int) else Path(os.fsdecode(file))
        start = Path.cwd() if directory is None else Path(f"/proc/self/fd/{directory}").readlink()
        return (start / path).is_relative_to(self.root)

    def _made_durable(self, inode: int) -> None:
        number = self._numbers.get(inode)
        if number is not None:
            self._nodes[number].durable = self._nodes[number].now

    def _look(self) -> None:
        seen: set[int] = set()
        self._visit(self.root, seen)
        self._numbers = {inode: number for inode, number in self._numbers.items() if inode in seen}

    def _visit(self, path: Path, seen: set[int]) -> int:
        """The number of what is at `path`, brought up to date."""
        inode = path.stat().st_ino
        seen.add(inode)
        is_dir = path.is_dir()
        now = {child.name: self._visit(child, seen) for child in path.iterdir()} if is_dir else path.read_bytes()
        if inode not in self._numbers:
            self._numbers[inode] = len(self._nodes)
            self._nodes[len(self._nodes)] = _Node(now, {} if is_dir else b"")
        self._nodes[self._numbers[inode]].now = now
        return self._numbers[inode]

    def _restore(self, number: int, target: Path, rng: random.Random) -> None:
        node = self._nodes[number]
        if isinstance(node.now, bytes):
            assert isinstance(node.durable, bytes)
            target.write_bytes(_torn(node.durable, node.now, rng))
            return
        assert isinstance(node.durable, dict)
        target.mkdir()
        for names in _moved_together(node.now, node.durable):
            chosen = rng.choice((node.now, node.durable))
            for name in sorted(names & chosen.keys()):
                self._restore(chosen[name], target / name, rng)


def _moved_together(now: dict[str, int], durable: dict[str, int]) -> list[set[str]]:
    """Names that a rename binds to each other: it happened or it did not."""
    groups: list[tuple[set[str], set[int]]] = []
    for name in sorted(now.keys() | durable.keys()):
        names, nodes = {name}, {names[name] for names in (now, durable) if name in names}
        for group in [group for group in groups if group[1] & nodes]:
            groups.remove(group)
            names, nodes = names | group[0], nodes | group[1]
        groups.append((names, nodes))
    return [names for names, _ in groups]


def _torn(old: bytes, new: bytes, rng: random.Random) -> bytes:
    """Each page as it was or as it is; what was never written reads as zeros."""
    size = rng.choice((len(old), len(new)))
    pages = [rng.choice((old, new))[first : first + _PAGE].ljust(_PAGE, b"\0") for first in range(0, size, _PAGE)]
    return b"".join(pages)[:size]


def run_power_losses(root: Path, *, num_losses: int, seed: int) -> Losses:
    """One campaign; the power fails at random moments, and each time a copy continues from there and is judged."""
    rng = random.Random(seed)
    losses = Losses()
    acknowledged: list[str] = []
    live = root / "live"
    live.mkdir(parents=True)
    recorder = Recorder(live)
    left = num_losses

    def maybe_fail() -> None:
        nonlocal left
        if left and rng.random() < _CHANCE:
            left -= 1
            recorder.after_power_loss(root / f"after-{left}", rng)
            losses.add(judge(root / f"after-{left}", acknowledged))

    recorder.before_call = maybe_fail
    with recorder.watching():
        writer = Writer(live, first=0, seed=seed, mean_tokens=_MEAN_TOKENS)
        scorer = Scorer(live)
        consumer = Consumer(live, on_damage=losses.unreadable.append)
        while left:
            acknowledged += writer.step()
            scorer.step()
            if rng.random() < 0.5:
                consumer.step()
    return losses
