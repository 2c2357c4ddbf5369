"""Python's garbage collector while a process starts.

pause_collection   import heavy packages without collections

Importing torch and transformers makes 400,000 objects that stay. The collector would look through them dozens of times
while there is nothing to free, which is a sixth of the CPU time of such a start, and again in every full collection.
"""

import atexit
import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def pause_collection() -> Iterator[None]:
    """Collect nothing in this block, and leave what exists at its end out of later collections, until the process ends.

    The block should only import: cycles that it leaves behind are not freed.
    """
    if not gc.isenabled():  # a caller has paused it
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        atexit.unregister(gc.unfreeze)
        atexit.register(gc.unfreeze)  # some packages report what an interpreter does not free at its end
