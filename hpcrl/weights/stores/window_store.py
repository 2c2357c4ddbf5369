"""The store of weight versions in a node's shared memory: two versions, and no copies for readers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hpcrl.campaign_dir.paths import JobDir
from hpcrl.errors import WeightsError
from hpcrl.weights.layout import TensorLayout
from hpcrl.weights.stores.pinned_slots import PinnedSlots
from hpcrl.weights.stores.store import Tensors, WeightStore, check_tensors, copy_tensors, view_tensors
from hpcrl.weights.versions import VersionManifest, WeightVersion
from hpcrl.weights.window.file import WindowKey
from hpcrl.weights.window.window import Window


class WindowStore:
    """The window of a node; its trainer creates it with the first version, and readers open it once it exists."""

    def __init__(self, key: WindowKey, *, job: JobDir, layout: TensorLayout | None = None) -> None:
        """Set `layout` to publish tensors in its types; without it they are published as they are."""
        self._key = key
        self._job = job
        self._layout = layout
        self._window: Window | None = None
        self._pinned = PinnedSlots()

    # ---- the trainer's end

    def publish(self, tensors: Tensors, weight_version: WeightVersion) -> VersionManifest:
        return self.commit(self.stage(tensors, weight_version))

    def stage(self, tensors: Tensors, weight_version: WeightVersion) -> list[bytes]:
        """Copy the weights into the slot and return the checksums of the copies; the tensors may change afterwards."""
        layout = self._layout or TensorLayout.from_tensors(tensors)
        check_tensors(tensors, layout)
        if self._window is None or self._window.role != "writer":
            self.close()
            self._window = Window.create(self._key, layout, job=self._job)
        self._window.layout.check_same(layout, own_name="the window", other_name="the trainer")
        slot = self._window.start_version(weight_version.version, step=weight_version.step)
        if tensors:
            self._pinned.pin(slot, device=next(iter(tensors.values())).device)
        return copy_tensors(tensors, slot, layout)

    def commit(self, sums: list[bytes]) -> VersionManifest:
        """Make visible what was staged with these checksums; it is safe in another thread than `stage`."""
        assert self._window is not None, "stage comes before commit"
        names = (tensor.name for tensor in self._window.layout.tensors)
        return self._window.commit({name: one.hex() for name, one in zip(names, sums, strict=True)}, sums=sums)

    def newest_started(self) -> int | None:
        """Return the newest version that was ever in the window."""
        manifest = self.newest()
        return None if manifest is None else manifest.version

    def make_saver(self, files: WeightStore, weight_version: WeightVersion) -> Callable[[], object]:
        """Return what writes a version to files once it is committed."""

        def save() -> None:
            with self.read_version(weight_version.version) as tensors:
                files.publish(tensors, weight_version)

        return save

    def prune(self, *, keep: int) -> None:
        """Do nothing: a window holds two versions."""

    # ---- both ends

    def newest(self) -> VersionManifest | None:
        window = self._open_current()
        return None if window is None else window.newest()

    def load(self, version: int) -> Tensors:
        with self.read_version(version) as tensors:
            return {name: tensor.clone() for name, tensor in tensors.items()}

    @contextmanager
    def read_version(self, version: int) -> Iterator[Tensors]:
        window = self._open_existing(version)
        with window.read_version(version) as slot:
            yield view_tensors(slot, window.layout)

    def is_intact(self, version: int) -> bool:
        return self._window is not None and self._window.is_intact(version)

    def check_version(self, version: int) -> None:
        with self._open_existing(version).read_version(version):
            pass

    def close(self) -> None:
        """Close the window; its name stays."""
        if self._window is not None:
            self._pinned.release()
            self._window.close()
            self._window = None

    def unlink(self) -> None:
        """Remove the window's name, at the trainer's end."""
        if self._window is not None and self._window.role == "writer":
            self._window.unlink()

    def _open_existing(self, version: int) -> Window:
        """Return a window with a version: also one that has just lost its name, as at the trainer's end."""
        if self._window is not None and version in self._window.versions():
            return self._window
        window = self._open_current()
        if window is None:
            raise WeightsError(f"version {version} is not available: {self._key.path} does not exist")
        return window

    def _open_current(self) -> Window | None:
        """Return the window of this name, opened again if it has been replaced."""
        if self._window is None or self._window.role != "writer":
            self._window = Window.reopen(self._window, self._key, job=self._job.number)
        return self._window
