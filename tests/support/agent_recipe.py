"""One recipe in which every unmodified agent is a domain: each is trained on beside the others, in the same step.

AGENTS            the agents, by the name of their domain
AGENTS_DIR        where they are installed: `make test-agents` makes .venv-agents, HPCRL_AGENTS names another directory
find_missing      why an agent cannot run on this machine; "" if it can
write_recipe      the recipe of some of them, as a file, with the repositories that one of them repairs
"""

import json
import os
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrl.envs.examples.repositories import write_repository
from tests.support.plans import make_recipe

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "agent_programs"
AGENTS_DIR = Path(os.environ.get("HPCRL_AGENTS") or ROOT / ".venv-agents").absolute()
PYTHON = AGENTS_DIR / "bin" / "python"
CODE_REPAIR = "mini-swe-agent"
"""The domain of the shipped recipe code-repair, with its options."""


@dataclass(frozen=True, kw_only=True)
class InstalledAgent:
    """An agent: the directory of its package, its program here, and what an episode of it has at least."""

    package: str
    program: str = ""
    min_turns: int = 2

    @property
    def is_node(self) -> bool:
        return self.program.endswith(".mjs")


AGENTS = {
    "openai": InstalledAgent(program="openai_tools.py", package="openai"),
    "openai-agents": InstalledAgent(program="openai_agents.py", package="agents"),
    "smolagents-code": InstalledAgent(program="smolagents_code.py", package="smolagents"),
    "smolagents-tools": InstalledAgent(program="smolagents_tools.py", package="smolagents"),
    "pydantic-ai": InstalledAgent(program="pydantic_ai_output.py", package="pydantic_ai", min_turns=1),
    "langgraph": InstalledAgent(program="langgraph_react.py", package="langgraph"),
    "litellm": InstalledAgent(program="litellm_calls.py", package="litellm"),
    CODE_REPAIR: InstalledAgent(package="minisweagent"),
    "node-openai": InstalledAgent(program="node_openai.mjs", package="openai"),
    "node-anthropic": InstalledAgent(program="node_anthropic.mjs", package="@anthropic-ai/sdk"),
}


def find_missing(name: str) -> str:
    """Return why an agent cannot run on this machine, and how to install it; "" if it can."""
    agent = AGENTS[name]
    if agent.is_node and shutil.which("node") is None:
        return "node is not installed"
    places = AGENTS_DIR.glob("node_modules" if agent.is_node else "lib/python*/site-packages")
    if not any((place / agent.package).is_dir() for place in places):
        return f"the package {agent.package} is not in {AGENTS_DIR}: run `make test-agents`, which installs it"
    return ""


def write_recipe(path: Path, names: Collection[str], *, sandbox: str) -> None:
    """Write the recipe; with `max_lag = 0` a step takes a group of every domain."""
    domains = {name: _make_domain(name, sandbox=sandbox, folder=path.parent) for name in names}
    table: dict[str, Any] = {
        "name": "agents",
        "model": {"tiny": {"hidden_size": 32, "context_length": 16384}},  # a token a character: CodeAgent sends 9,000
        "domains": domains,
        "rollout": {"group_size": 2, "max_lag": 0, "max_running": 4, "max_new_tokens": 160},
        "spool": {"seal_after_s": 0.5},
        "train": {"num_steps": 1, "groups_per_step": len(domains), "learning_rate": 1e-3},
        "resources": {"env": {"mem_gib_per_worker": 8}},
        "job": {"walltime_min": 120, "stall_timeout_min": 60},  # the imports of some agents take a minute
    }
    path.write_text("".join(f"{name} = {_format_toml(value)}\n" for name, value in table.items()))


def _make_domain(name: str, *, sandbox: str, folder: Path) -> dict[str, Any]:
    base = str(PYTHON.resolve().parents[1])  # the Python that the virtual environment was made with
    options: dict[str, Any] = {
        "readable": [str(AGENTS_DIR), str(PROGRAMS), base],
        "sandbox": sandbox,
        "timeout_s": 1500.0,
    }
    domain = {"env": "hpcrl.envs.agent:AgentProgram", "max_turns": 6, "episode_timeout_s": 3600.0, "options": options}
    if name == CODE_REPAIR:
        shipped = make_recipe(name="code-repair").domains["repair"].options
        rows = [write_repository(folder / "repositories", number) for number in range(2)]
        (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        path = f"{AGENTS_DIR / 'bin'}:{os.defpath}"
        environment = {"PATH": path, **shipped["environment"]}
        return {
            **domain,
            "tasks": str(folder / "tasks.jsonl"),
            "max_turns": AGENTS[name].min_turns,
            "options": {**shipped, **options, "environment": environment},
        }
    program = str(PROGRAMS / AGENTS[name].program)
    options["command"] = [shutil.which("node") if AGENTS[name].is_node else str(PYTHON), program]
    options["environment"] = {
        "AGENT_PACKAGES": str(AGENTS_DIR / "package.json"),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # no download of prices
        "OPENAI_AGENTS_DISABLE_TRACING": "1",  # no traces to OpenAI
    }
    return domain


def _format_toml(value: Any) -> str:
    match value:
        case dict():
            return "{" + ", ".join(f"{name} = {_format_toml(one)}" for name, one in value.items()) + "}"
        case list():
            return f"[{', '.join(map(_format_toml, value))}]"
        case _:
            return json.dumps(value)
