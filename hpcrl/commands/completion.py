"""Completion of command lines in bash, zsh and fish: the shell asks `hpcrl __complete WORDS...` for candidates.

make_script          the script of a shell, for `hpcrl completion SHELL`
find_candidates      the words that may stand where the last one is
complete_words       the same, or nothing at all
SHELLS, COMPLETE_COMMAND   the shells, and the hidden command
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SHELLS = ("bash", "zsh", "fish")
COMPLETE_COMMAND = "__complete"
_SCRIPTS = {
    "bash": """\
# hpcrl in bash: eval "$(hpcrl completion bash)" in ~/.bashrc
_hpcrl() {
    local IFS=$'\\n' word="${COMP_WORDS[COMP_CWORD]}"
    COMPREPLY=($(compgen -W "$("${COMP_WORDS[0]}" @COMMAND@ "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)" -- "$word"))
}
complete -o default -F _hpcrl hpcrl""",
    "zsh": """\
#compdef hpcrl
# hpcrl in zsh: eval "$(hpcrl completion zsh)" in ~/.zshrc, after compinit
_hpcrl() {
    local -a found
    found=(${(f)"$("${words[1]}" @COMMAND@ "${(@)words[2,CURRENT]}" 2>/dev/null)"})
    (( ${#found} )) && compadd -- "${found[@]}" || _files
}
compdef _hpcrl hpcrl""",
    "fish": """\
# hpcrl in fish: hpcrl completion fish | source in ~/.config/fish/config.fish
function __hpcrl_candidates
    set -l words (commandline -opc) (commandline -ct)
    $words[1] @COMMAND@ $words[2..-1] 2>/dev/null
end
complete -c hpcrl -a '(__hpcrl_candidates)'""",
}


def run_completion(arguments: argparse.Namespace) -> int:
    from hpcrl.system.terminal import print_line

    print_line(make_script(arguments.shell))
    return 0


def make_script(shell: str) -> str:
    """Return the script of a shell."""
    return _SCRIPTS[shell].replace("@COMMAND@", COMPLETE_COMMAND)


def find_candidates(parser: argparse.ArgumentParser, words: Sequence[str]) -> list[str]:
    """Return what may stand in place of the last word; the words before it are complete."""
    *before, last = words or [""]
    option: argparse.Action | None = None
    positions: list[str] = []
    for word in before:
        if option is not None:
            option = None
        elif word.startswith("-") and word != "-":
            option = _find_option(parser, word)
        elif (commands := _find_commands(parser)) is not None:
            if word not in commands:
                return []
            parser, positions = commands[word], []
        else:
            positions.append(word)
    if option is not None:
        found = _list_values(option)
    elif last.startswith("-"):
        found = [name for action in parser._actions for name in action.option_strings]
    else:
        found = _list_positions(parser, positions)
    return sorted({one for one in found if one.startswith(last)})


def _find_option(parser: argparse.ArgumentParser, word: str) -> argparse.Action | None:
    """Return the option that a word names if the next word is its value."""
    action = parser._option_string_actions.get(word)
    return action if action is not None and action.nargs != 0 else None


def _find_commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser] | None:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return None


def _list_positions(parser: argparse.ArgumentParser, before: Sequence[str]) -> list[str]:
    num_before = len(before)
    commands = _find_commands(parser)
    if commands is not None:
        return [name for name in commands if not name.startswith("_")]
    actions = [action for action in parser._actions if not action.option_strings]
    if not actions:
        return []
    is_known = num_before < len(actions)
    if not is_known and actions[-1].nargs not in ("+", "*", 2):
        return []
    action = actions[num_before if is_known else -1]
    match parser.prog.split()[1:]:
        case ["site", "show"]:
            return _list_known("site")
        case ["site", "new"]:
            return []
        case ["schema"]:
            return _list_schemas()
        case ["help"] if num_before == 0:
            return _list_topics()
        case ["lab"] if action.dest == "part":
            return _list_lab_parts() if before[0] in ("break", "restore") else []
    return _list_values(action)


def _list_values(action: argparse.Action) -> list[str]:
    if action.choices is not None:
        return [str(choice) for choice in action.choices]
    kind = str(action.metavar or action.dest).upper()
    match kind:
        case "CAMPAIGN":
            return _list_campaigns()
        case "RECIPE" if action.dest == "parent":
            return _list_known("recipe")
        case "RECIPE" | "SITE" | "NAME" if action.dest in ("recipe", "site", "like"):
            return _list_files() + _list_known("recipe" if action.dest == "recipe" else "site")
        case "ROLE":
            return [*_list_roles(), "driver"]
        case "KIND":
            return _list_kinds()
        case _:
            return []


def _list_campaigns() -> list[str]:
    from hpcrl.campaign.directory import list_campaigns
    from hpcrl.errors import CampaignError

    try:
        return [campaign.name for campaign in list_campaigns()]
    except CampaignError:
        return []


def _list_known(kind: str) -> list[str]:
    from hpcrl.config.toml import list_known_names

    return list_known_names("recipes" if kind == "recipe" else "sites")


def _list_files() -> list[str]:
    return [str(path) for path in Path().glob("*.toml")]


def _list_roles() -> list[str]:
    from hpcrl.config.recipe import ROLES

    return list(ROLES)


def _list_kinds() -> list[str]:
    from hpcrl.campaign_dir.events import CampaignEvent

    return [str(kind.__struct_config__.tag) for kind in CampaignEvent.__subclasses__()]


def _list_topics() -> list[str]:
    from hpcrl.commands.examples import EXAMPLES
    from hpcrl.commands.topics import TOPICS

    return [*TOPICS, *EXAMPLES]


def _list_lab_parts() -> list[str]:
    from hpcrl.lab.conf import DEFAULT_CLUSTER
    from hpcrl.lab.outages import CONTROLLER

    return [*DEFAULT_CLUSTER.node_names(), CONTROLLER]


def _list_schemas() -> list[str]:
    from hpcrl.commands.schemas import JSON_OUTPUTS

    return list(JSON_OUTPUTS)


def complete_words(parser: argparse.ArgumentParser, words: Sequence[Any]) -> list[str]:
    """Return the candidates; nothing at all if anything fails, as a shell has no use for an error."""
    try:
        return find_candidates(parser, [str(word) for word in words])
    except Exception:  # noqa: BLE001 - a damaged campaign or recipe must not print into a command line
        return []
