"""A node's window as those see it who only read: made with the first version, perhaps anew after a restart."""

from hpcrl.weights.window import Key, Window


class Current:
    """The window that has this name now; one that has been replaced is let go."""

    def __init__(self, key: Key, *, job: int) -> None:
        self._key = key
        self._job = job
        self._window: Window | None = None

    def window(self) -> Window | None:
        """None: there is none (of this job)."""
        if self._window is not None and not self._window.is_current():
            self._window.close()
            self._window = None
        if self._window is None:
            self._window = Window.open(self._key, job=self._job)
        return self._window
