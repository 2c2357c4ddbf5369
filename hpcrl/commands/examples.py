"""The examples with which the help of each command ends.

EXAMPLES         those of each command
add_examples     adds them to a parser
find_parsers     the parsers of all commands by their words
"""

import argparse
from collections.abc import Iterator

EXAMPLES: dict[str, tuple[str, ...]] = {
    "": ("hpcrl submit quickstart --site local --watch", "hpcrl report quickstart-1", "hpcrl help resume"),
    "plan": (
        "hpcrl plan quickstart --site local",
        "hpcrl plan quickstart --site perlmutter -s site.account=m1234",
        "hpcrl plan my/recipe.toml --site lab --dag",
    ),
    "submit": (
        "hpcrl submit quickstart --site local --watch",
        "hpcrl submit quickstart --site perlmutter -s site.account=m1234 --dry-run",
        "hpcrl submit my/recipe.toml --site lab --name mine -s rollout.group_size=16",
    ),
    "stage": (
        "hpcrl stage my/recipe.toml --site perlmutter",
        "hpcrl stage quickstart --site local -s model.path=Qwen/Qwen3-0.6B",
    ),
    "image": (
        "hpcrl image --site lumi",
        "hpcrl image --site perlmutter --wheel dist/hpcrl-0.1.0-py3-none-any.whl --build",
    ),
    "ls": ("hpcrl ls", "hpcrl ls --json"),
    "monitor": ("hpcrl monitor quickstart-1", "hpcrl monitor quickstart-1 --once", "hpcrl monitor quickstart-1 --json"),
    "logs": ("hpcrl logs quickstart-1", "hpcrl logs quickstart-1 train -n 100", "hpcrl logs quickstart-1 driver -f"),
    "stop": ("hpcrl stop quickstart-1", "hpcrl stop quickstart-1 --now"),
    "resume": (
        "hpcrl resume quickstart-1 --watch",
        "hpcrl resume quickstart-1 -s train.learning_rate=1e-6 -s job.walltime_min=120",
    ),
    "extend": ("hpcrl extend quickstart-1 --steps 80", "hpcrl extend quickstart-1 --jobs 2"),
    "gc": ("hpcrl gc", "hpcrl gc quickstart-1 --archive --yes"),
    "export": (
        "hpcrl export quickstart-1 --hf model/",
        "hpcrl export quickstart-1 --hf model-30/ --step 30",
        "hpcrl export quickstart-1 --mlflow",
    ),
    "traj": ("hpcrl traj ls quickstart-1", "hpcrl traj show quickstart-1 --best", "hpcrl traj stats quickstart-1"),
    "traj ls": ("hpcrl traj ls quickstart-1", "hpcrl traj ls quickstart-1 --domain lake --status truncated -n 5"),
    "traj show": ("hpcrl traj show quickstart-1 --best", "hpcrl traj show quickstart-1 lake/3/0 --tokens"),
    "traj stats": ("hpcrl traj stats quickstart-1", "hpcrl traj stats quickstart-1 --json"),
    "traj export": (
        "hpcrl traj export quickstart-1 episodes.parquet",
        "hpcrl traj export quickstart-1 logs/ --format inspect",
    ),
    "traj verify": ("hpcrl traj verify quickstart-1",),
    "report": ("hpcrl report quickstart-1", "hpcrl report quickstart-1 quickstart-2 -o compared.html --png"),
    "doctor": ("hpcrl doctor --site mycluster", "hpcrl doctor --site lab --job"),
    "site": ("hpcrl site ls", "hpcrl site show perlmutter", "hpcrl site new mycluster --detect"),
    "site ls": ("hpcrl site ls",),
    "site show": ("hpcrl site show perlmutter",),
    "recipe": ("hpcrl recipe ls", "hpcrl recipe show qwen3-8b-math", "hpcrl recipe new mine --from qwen3-8b-math"),
    "recipe ls": ("hpcrl recipe ls",),
    "recipe show": ("hpcrl recipe show qwen3-8b-math",),
    "recipe new": ("hpcrl recipe new mine --from qwen3-8b-math",),
    "site new": ("hpcrl site new mycluster --detect",),
    "lab": ("hpcrl lab up", "hpcrl lab status", 'eval "$(hpcrl lab env)"', "hpcrl lab break env1", "hpcrl lab down"),
    "try": ("hpcrl try quickstart", "hpcrl try my/recipe.toml --domain lake -n 10"),
    "init": ("hpcrl init mine",),
    "events": ("hpcrl events quickstart-1", "hpcrl events quickstart-1 --kind fault --kind worker-failed -f"),
    "compare": ("hpcrl compare quickstart-1 quickstart-2", "hpcrl compare quickstart-1 quickstart-2 --json"),
    "calibrate": ("hpcrl calibrate my-campaign", "hpcrl calibrate servers.csv --hold-out b200 --json"),
    "simulate": (
        "hpcrl simulate quickstart --site local --steps 20",
        "hpcrl simulate my/recipe.toml --site my-perlmutter --gpus 128 --traces calls.csv --timeline steps.svg",
    ),
    "rm": ("hpcrl rm quickstart-1", "hpcrl rm quickstart-1 quickstart-2 --yes"),
    "help": ("hpcrl help", "hpcrl help recipe", "hpcrl help recipe rollout", "hpcrl help submit"),
    "schema": ("hpcrl schema", "hpcrl schema monitor"),
    "completion": ('eval "$(hpcrl completion bash)"',),
    "man": ("mkdir -p ~/.local/share/man/man1 && hpcrl man > ~/.local/share/man/man1/hpcrl.1",),
}


def find_parsers(
    parser: argparse.ArgumentParser, *, before: tuple[str, ...] = ()
) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of all commands by their words, without `hpcrl`; those that have actions come before these."""
    return dict(_iterate_parsers(parser, before))


def _iterate_parsers(
    parser: argparse.ArgumentParser, before: tuple[str, ...]
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield " ".join((*before, name)), inner
                yield from _iterate_parsers(inner, (*before, name))


def add_examples(parser: argparse.ArgumentParser) -> None:
    """End the help of each command with its examples, and that of all with some."""
    for name, inner in ({"": parser} | find_parsers(parser)).items():
        if examples := EXAMPLES.get(name):
            inner.epilog = "\n".join(["examples:", *(f"  {example}" for example in examples)])
            inner.formatter_class = argparse.RawDescriptionHelpFormatter
