"""Good and misbehaving environments for tests."""

import os
import subprocess
import sys
import time
from pathlib import Path

from hpcrl.envs.base import Step


class Echo:
    """A good environment, which returns each action as the observation."""

    def reset(self, seed):
        return f"s{seed}"

    def step(self, action):
        return Step(observation=action, reward=1.0, done=action == "done")

    def close(self):
        pass


class AsyncEcho:
    """The same with async methods."""

    async def reset(self, seed):
        return f"s{seed}"

    async def step(self, action):
        return Step(observation=action, reward=1.0, done=action == "done")

    async def close(self):
        pass


class Bad(Echo):
    """An environment that misbehaves in the call `where` in the way `how`, and reports in the directory `note`."""

    def __init__(self, where, how, note="."):
        self.note = Path(note)
        self.how = how
        setattr(self, where, lambda *_: getattr(self, how)())

    def raises(self):
        raise ZeroDivisionError("the world ended")

    def hangs(self):
        (self.note / "hanging").write_text(str(os.getpid()))
        while True:
            time.sleep(1)

    def forks(self):
        """Start a daemon in its own session and a child with our descriptors, both deaf to SIGTERM; then hang."""
        code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        daemon = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
        child = os.fork()
        if child == 0:
            time.sleep(600)
            os._exit(0)
        (self.note / "pids").write_text(f"{daemon.pid} {child} {os.getpid()}")
        self.hangs()

    def grows(self):
        held = []
        while True:
            held.append(bytearray(32 << 20))

    def spins(self):
        while True:
            pass

    def shouts(self):
        line = b"x" * (1 << 20)
        for _ in range(1024):
            os.write(1, line)
        return "done shouting"

    def dies(self):
        print("I cannot go on", flush=True)  # noqa: T201 - its last output
        os._exit(7)

    def leaves(self):
        raise SystemExit(3)

    def wrong_type(self):
        return 42

    def wrong_reward(self):
        return Step(observation="", reward="much")

    def endless(self):
        return Step(observation="x" * (17 << 20))
