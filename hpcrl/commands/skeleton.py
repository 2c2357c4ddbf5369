"""Write a recipe and an environment to start from: `hpcrl init`.

write_skeleton, describe_next     writes them into a directory; the lines that name what to do next
RECIPE_TEXT, ENVIRONMENT_TEXT    what is written
"""

import argparse
import re
import shlex
from pathlib import Path

from hpcrl.config.toml import NAME_PATTERN, PATTERN_MEANINGS
from hpcrl.errors import ConfigError
from hpcrl.system.files import OUTPUT_MODE, publish_file
from hpcrl.system.terminal import print_line

RECIPE_TEXT = """\
# What to learn. `hpcrl try recipe.toml` plays a few episodes, `hpcrl submit recipe.toml --site local --watch` trains.
name = "@NAME@"

[model.tiny]                     # a tiny model, made at the start; for a real one write instead:
# [model]
# path = "/models/Qwen3-8B"      # a directory of the hub's files: config.json, tokenizer, *.safetensors

# Where its code is found, here and in jobs; set it in each shell:  export PYTHONPATH=@FOLDER@
[domains.guess]                  # one table for each environment; add others to train them together
env = "@MODULE@:GuessNumber"     # module:class
reward = "@MODULE@:reward"       # module:function of a finished trajectory; without it the steps' rewards are added up
max_turns = 4

[domains.guess.options]          # the arguments of GuessNumber
highest = 4

[rollout]
group_size = 8                   # episodes of one task, which are compared with each other
max_lag = 2                      # how many versions behind the newest an episode may be
max_running = 64                 # episodes at the same time
max_new_tokens = 1               # of one turn

[train]
num_steps = 40
groups_per_step = 8              # a step is trained on group_size x groups_per_step episodes
learning_rate = 5e-3             # of a tiny model; real ones take about 1e-6
checkpoint_every_steps = 10

[spool]
seal_after_s = 0.2               # how often trajectories become durable; some seconds in a real campaign

[job]
walltime_min = 20                # of one job; num_jobs = 6 would chain six of them
"""

ENVIRONMENT_TEXT = '''\
"""An environment and its reward: guess a number; each wrong guess is answered by whether it is higher or lower."""

from hpcrl.envs.base import Step
from hpcrl.spool.record import Trajectory


class GuessNumber:
    """One episode at a time: reset, then steps until one is done."""

    def __init__(self, *, highest: int = 4) -> None:
        self.highest = highest

    def reset(self, seed: int) -> str:
        """Start the task of this seed: the same seed is the same task."""
        self.secret = seed % (self.highest + 1)
        return f"guess 0-{self.highest}"

    def step(self, action: str) -> Step:
        """Answer what the model generated, whatever it is: a bad action is a normal step."""
        guess = action.strip()
        if guess == str(self.secret):
            return Step(observation="yes", reward=1.0, done=True)
        if not guess.isdecimal():
            return Step(observation="a number", reward=-0.2)
        return Step(observation="higher" if int(guess) < self.secret else "lower", reward=-0.05)

    def close(self) -> None:
        """Free what the episode used."""


def reward(trajectory: Trajectory) -> float:
    """Return the reward of a finished episode: here the sum of its steps' rewards."""
    return sum(turn.reward for turn in trajectory.turns)
'''


def run_init(arguments: argparse.Namespace) -> int:
    for line in describe_next(write_skeleton(arguments.directory)):
        print_line(line)
    return 0


def write_skeleton(directory: Path) -> list[Path]:
    """Write recipe.toml and the module of its environment into a directory, which is made; nothing is replaced."""
    name = directory.absolute().name
    if not re.match(NAME_PATTERN, name):
        raise ConfigError(
            f"{name!r} would be the recipe's name: choose a directory with {PATTERN_MEANINGS[NAME_PATTERN]}"
        )
    module = f"{re.sub('[^A-Za-z0-9]', '_', name).lower()}_env"
    if module[0].isdecimal():
        module = f"my_{module}"
    files = {"recipe.toml": RECIPE_TEXT, f"{module}.py": ENVIRONMENT_TEXT}
    for file in files:
        if (directory / file).exists():
            raise ConfigError(f"{directory / file} exists: choose another directory, or remove it")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            for mark, value in (
                ("@NAME@", name),
                ("@MODULE@", module),
                ("@FOLDER@", shlex.quote(str(directory.absolute()))),
            ):
                text = text.replace(mark, value)
            publish_file(directory / file, text, mode=OUTPUT_MODE)
    except OSError as error:
        raise ConfigError(f"{directory} cannot be written: {error.strerror}") from error
    return [directory / file for file in files]


def describe_next(files: list[Path]) -> list[str]:
    """Return the lines that name the files and the commands that use them."""
    recipe, environment = files
    folder = recipe.parent
    return [
        f"{recipe} is what to learn, {environment} is the environment and its reward; next:",
        f"  export PYTHONPATH={shlex.quote(str(folder.absolute()))}${{PYTHONPATH:+:$PYTHONPATH}}",
        f"  hpcrl try {shlex.quote(str(recipe))}                            # three episodes, shown",
        f"  hpcrl submit {shlex.quote(str(recipe))} --site local --watch    # train",
    ]
