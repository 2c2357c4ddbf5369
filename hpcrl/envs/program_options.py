"""The options of AgentProgram, checked, with their paths expanded.

ProgramOptions   the options
read_options     make them of a table of a recipe; ConfigError with the option that is wrong
JudgeRewardSource, MIN_PROCESSES   a type, and the least of a limit
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_origin, get_type_hints

import msgspec

from hpcrl.config.program import DEFAULT_MAX_DISK_MB, DEFAULT_MAX_MEMORY_MB, INTERPRETERS
from hpcrl.envs.base import ConversationChoice, SamplingSource, check_program_choices
from hpcrl.envs.isolation.sandbox import SandboxChoice
from hpcrl.errors import ConfigError
from hpcrl.system.files import expand_path

JudgeRewardSource = Literal["printed", "exit-code"]
MIN_PROCESSES = 32
"""A sandbox and a program have a dozen tasks themselves."""
_LEAST = {
    "timeout_s": 1e-3,
    "judge_timeout_s": 1e-3,
    "cpu_s": 1,
    "max_processes": MIN_PROCESSES,
    "max_memory_mb": 64,
    "max_disk_mb": 1,
    "image_cache_gib": 0,
}
_OWN_PLACES = ("/tmp", "/dev/shm", "/proc", "/sys", "/episode/work", "/episode/home")
"""The directories of a sandbox that are not the image's."""
_TYPE_WORDS: tuple[tuple[Any, str], ...] = (
    (bool, "true or false"),
    (int, "a whole number"),
    (float, "a number"),
    (str, "a string"),
    (tuple[str, ...], "a list of strings, such as ['a', 'b']"),
    (dict[str, Any], "a table"),
    (dict[str, str | int | float], "a table of strings and numbers, such as {PORT = 8080}"),
)
"""The types of options, as they are described to users."""


class ProgramOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of one domain."""

    command: tuple[str, ...]
    """The program with its arguments, in which {field} is a field of the task that the program is given; `python` is
    the one that runs hpcrl, or that of the image."""
    task: dict[str, Any] = {}
    """Fields that are added to the task, beside the seed, which only a row of the domain's `tasks` replaces."""
    environment: dict[str, str | int | float] = {}
    """Variables to set; numbers become texts."""
    sandbox: SandboxChoice = "auto"
    """Auto (apptainer if there is an image, else bubblewrap), apptainer, bubblewrap (no image), or none."""
    image: str | None = None
    """The image for apptainer: a file, or one of a registry such as docker://name; {field} is a task's field."""
    image_directory: str | None = None
    """A directory of the image, such as /testbed, that the program works in and may change: each episode has a copy in
    its place, which its judge finds there too."""
    image_cache: str | None = None
    """A directory of each node for images of registries."""
    image_cache_gib: float = 50.0
    staged_images: str | None = None
    """The directory of images that `hpcrl stage` pulled; the default is that of the site."""
    directory: str | None = None
    """A directory whose content is copied to the working directory; {field} is a task's field."""
    readable: tuple[str, ...] = ()
    """Paths that the program may read in the sandbox, such as that of its code."""
    timeout_s: float = 600.0
    """The time limit of the whole program."""
    judge: tuple[str, ...] | None = None
    """A command that is run after the program has ended, in a new sandbox with the same working directory."""
    judge_readable: tuple[str, ...] = ()
    """Paths that only the judge may read."""
    judge_fields: tuple[str, ...] = ()
    """Fields of the task that only the judge is given."""
    judge_reward: JudgeRewardSource = "printed"
    """Printed: the reward is the last line of the judge; exit-code: it is 1 if the judge ends with 0, else 0."""
    judge_timeout_s: float = 600.0
    posts_reward: bool = False
    """Allow the program to post its reward, with a separate key that it reads from a descriptor."""
    calls_judges: tuple[str, ...] = ()
    """Judges of the campaign ([judge.NAME]) that the program may call, without a sandbox; none by default."""
    cpu_s: int = 3600
    """The CPU time of each of its processes."""
    max_processes: int = 1024
    """The limit of processes and threads of a sandbox as a whole; the next two are those of memory and files."""
    max_memory_mb: int = DEFAULT_MAX_MEMORY_MB
    max_disk_mb: int = DEFAULT_MAX_DISK_MB
    sampling: SamplingSource = "recipe"
    """Recipe: temperature and the like are the recipe's, so that every turn can be trained on; program: as the program
    requests, and turns sampled differently from the recipe are not trained on."""
    trains: ConversationChoice = "all"
    """All, longest or last: which of its conversations are trained on, if there are several."""

    @property
    def variables(self) -> dict[str, str]:
        return {name: str(value) for name, value in self.environment.items()}


def read_options(table: Mapping[str, Any]) -> ProgramOptions:
    """Return the options of a table; raises ConfigError for one that is wrong, or that does not go with another."""
    check_program_choices(
        "AgentProgram",
        **{name: (table[name], kind) for name, kind in _list_option_types(choices=True).items() if name in table},
    )
    options = ProgramOptions(**{**table, **_convert_options(table)})
    for name, given in (("command", options.command), ("judge", options.judge)):
        if given is not None and not given:
            raise ConfigError(f"AgentProgram: {name} = []: give a list, such as ['python', '{name}.py']")
    _check_variables(options.variables)
    for name, least in _LEAST.items():
        if not (number := getattr(options, name)) >= least:
            raise ConfigError(f"AgentProgram: {name} = {number!r}: it must be {least:g} or more")
    _check_together(options)
    return _expand_paths(options)


@cache
def _list_option_types(*, choices: bool) -> dict[str, Any]:
    """Return the types of the options that are choices, or of the others."""
    hints = get_type_hints(ProgramOptions)
    return {name: kind for name, kind in hints.items() if (get_origin(kind) is Literal) == choices}


def _convert_options(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are not choices in their types; raises ConfigError for a value of another type."""
    converted = {}
    for name, kind in _list_option_types(choices=False).items():
        if name not in table:
            continue
        try:
            converted[name] = msgspec.convert(table[name], kind)
        except msgspec.ValidationError:
            needed = next(words for known, words in _TYPE_WORDS if kind in (known, known | None))
            raise ConfigError(f"AgentProgram: {name} = {table[name]!r:.200}: give {needed}") from None
    return converted


def _check_together(options: ProgramOptions) -> None:
    """Raise ConfigError for options that do not go with each other."""
    if "seed" in options.task:
        raise ConfigError("AgentProgram: task has a field 'seed', which is the task's seed: give it another name")
    if options.judge is None and (options.judge_readable or options.judge_fields):
        raise ConfigError("AgentProgram: judge_readable and judge_fields need a judge: set `judge` to its command")
    if options.judge is not None and options.posts_reward:
        raise ConfigError("AgentProgram: posts_reward = true with a judge: the reward is the judge's, remove one")
    if options.image_directory is not None:
        _check_image_directory(options)
    if options.calls_judges and options.sandbox != "none":
        raise ConfigError(
            f"AgentProgram: calls_judges = {list(options.calls_judges)!r} with sandbox = {options.sandbox!r}, which "
            'has no network: remove it, or set sandbox = "none"'
        )


def _check_image_directory(options: ProgramOptions) -> None:
    """Raise ConfigError for a directory of an image that cannot be the working directory."""
    given = f"AgentProgram: image_directory = {options.image_directory!r}"
    if options.image is None or options.sandbox not in ("auto", "apptainer"):
        raise ConfigError(f'{given} needs an `image`, with sandbox = "auto" or "apptainer"')
    if options.directory is not None:
        raise ConfigError(f"{given} with directory = {options.directory!r}: the program works in one, remove the other")
    path = Path(str(options.image_directory))
    is_own = any(path.is_relative_to(place) or Path(place).is_relative_to(path) for place in _OWN_PLACES)
    if not path.is_absolute() or ".." in path.parts or is_own:
        raise ConfigError(f"{given}: give the whole path of a directory of the image, such as /testbed")


def _check_variables(environment: dict[str, Any]) -> None:
    """Raise ConfigError for what no process can be given as a variable."""
    for name, value in environment.items():
        if not name or "=" in name or "\0" in f"{name}{value}":
            raise ConfigError(
                f"AgentProgram: environment has {name!r} = {value!r:.100}: the name of a variable is not empty and "
                "has no '=', and neither it nor its value has a zero byte"
            )


def _expand_paths(options: ProgramOptions) -> ProgramOptions:
    return msgspec.structs.replace(
        options,
        command=_expand_command(options.command),
        judge=None if options.judge is None else _expand_command(options.judge),
        image=options.image and expand_text(options.image),
        image_cache=options.image_cache and expand_text(options.image_cache),
        directory=options.directory and expand_text(options.directory),
        readable=_make_absolute(options.readable),
        judge_readable=_make_absolute(options.judge_readable),
    )


def _make_absolute(paths: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(path if path.startswith("$") else str(Path(path).absolute()) for path in map(expand_text, paths))


def _expand_command(command: tuple[str, ...]) -> tuple[str, ...]:
    """Expand `~` and variables in the path of a program, and of the script that it is given."""
    program, *arguments = command
    if arguments and INTERPRETERS.fullmatch(Path(program).name) and not arguments[0].startswith("-"):
        arguments[0] = expand_text(arguments[0])
    return (expand_text(program), *arguments)


def expand_text(path: str) -> str:
    """Expand `~` and variables; an image of a registry stays as it is written."""
    return path if "$" not in path and not path.startswith("~") else str(expand_path(path))
