"""Weight versions in the shared memory of a node: two versions, and no copies for readers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hpcrl.campaign_dir.paths import JobDir
from hpcrl.errors import WeightsError
from hpcrl.weights.file_store import FileStore
from hpcrl.weights.layout import Layout
from hpcrl.weights.store import Tensors, _copy, tensors_in
from hpcrl.weights.versions import Manifest, WeightVersion
from hpcrl.weights.window.file import Key
from hpcrl.weights.window.window import Window


class WindowStore:
    """The window of a node; its trainer makes it with the first version, and readers find it when it is there."""

    def __init__(self, key: Key, *, job: JobDir) -> None:
        self._key = key
        self._job = job
        self._window: Window | None = None

    # ---- the trainer's end

    def publish(self, tensors: Tensors, weight_version: WeightVersion) -> Manifest:
        return self.commit(self.stage(tensors, weight_version))

    def stage(self, tensors: Tensors, weight_version: WeightVersion) -> list[bytes]:
        """Copy the weights into the slot; the tensors may change afterwards. The checksums of what lies there now."""
        layout = Layout.of(tensors)
        if self._window is None or self._window.end != "writer":
            self.close()
            self._window = Window.create(self._key, layout, job=self._job)
        self._window.layout.check_same(layout, ours="the window", theirs="the trainer")
        slot = self._window.begin(weight_version.version, step=weight_version.step)
        return _copy(tensors, slot, layout)

    def commit(self, sums: list[bytes]) -> Manifest:
        """Make visible what was staged with these checksums; safe in another thread than `stage`."""
        assert self._window is not None, "stage comes before commit"
        names = (tensor.name for tensor in self._window.layout.tensors)
        return self._window.commit({name: one.hex() for name, one in zip(names, sums, strict=True)}, sums=sums)

    def made(self) -> int | None:
        """The newest version that ever came into the window."""
        manifest = self.newest()
        return None if manifest is None else manifest.version

    def saver(self, files: FileStore, weight_version: WeightVersion) -> Callable[[], object]:
        """What writes a version to files once it is committed."""

        def save() -> None:
            with self.reading(weight_version.version) as tensors:
                files.publish(tensors, weight_version)

        return save

    def prune(self, *, keep: int) -> None:
        """Nothing to do: a window holds two versions."""

    # ---- both ends

    def newest(self) -> Manifest | None:
        window = self._current()
        return None if window is None else window.newest()

    def load(self, version: int) -> Tensors:
        with self.reading(version) as tensors:
            return {name: tensor.clone() for name, tensor in tensors.items()}

    @contextmanager
    def reading(self, version: int) -> Iterator[Tensors]:
        window = self._current()
        if window is None:
            raise WeightsError(f"version {version} is not here (there: none): {self._key.path} does not exist")
        with window.reading(version) as slot:
            yield tensors_in(slot, window.layout)

    def still(self, version: int) -> bool:
        return self._window is not None and self._window.still(version)

    def close(self) -> None:
        """Let go of the window; its name stays."""
        if self._window is not None:
            self._window.close()
            self._window = None

    def unlink(self) -> None:
        """Remove the window's name; for the trainer at its end."""
        if self._window is not None and self._window.end == "writer":
            self._window.unlink()

    def _current(self) -> Window | None:
        """The window of that name, opened anew if it has been replaced."""
        if self._window is None or self._window.end != "writer":
            self._window = Window.renewed(self._window, self._key, job=self._job.number)
        return self._window
