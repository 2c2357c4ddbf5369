"""Make the pages of the documentation site that are not files in docs/: MkDocs runs it as a hook (`make docs`).

The start is README.md; the reference is generated from the structs, the parsers and the schemas. Links to files outside
docs/ become their names, as the site has none of these files.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
OUTSIDE_LINK = re.compile(r"\[([^\]]*)\]\((?:\.\./)+[^)]*\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made here."""
    from mkdocs.structure.files import File

    for path, text in make_pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    return OUTSIDE_LINK.sub(r"\1", markdown)


def make_pages() -> dict[str, str]:
    """Return the text of each page by its path."""
    from hpcrl.config.recipe import Recipe
    from hpcrl.config.site import Site

    return {
        "index.md": (ROOT / "README.md").read_text().replace("](docs/", "](").replace("](CONTRIBUTING.md)", "]"),
        "reference/recipe.md": make_key_page("Keys of a recipe", Recipe),
        "reference/site.md": make_key_page("Keys of a site", Site),
        "reference/commands.md": make_command_page(),
        "reference/events.md": make_event_page(),
        "reference/json.md": make_json_page(),
    }


def make_key_page(title: str, kind: Any) -> str:
    from hpcrl.config.key_table import list_keys

    rows = [
        f"| `{key.key}` | {escape(key.type)} | {'**required**' if key.default is None else escape(key.default)} | "
        f"{escape(key.meaning)} |"
        for key in list_keys(kind)
    ]
    return "\n".join([f"# {title}", "", "| key | type | default | meaning |", "|---|---|---|---|", *rows])


def make_command_page() -> str:
    from hpcrl.cli import make_parser
    from hpcrl.commands.examples import find_parsers

    parts = ["# Commands and their options", ""]
    for name, parser in find_parsers(make_parser()).items():
        parts += [f"## hpcrl {name}", "", "```text", parser.format_help().rstrip(), "```", ""]
    return "\n".join(parts)


def make_event_page() -> str:
    from hpcrl.campaign_dir.events import CampaignEvent
    from hpcrl.config.key_table import list_keys

    parts = ["# Events", ""]
    for kind in CampaignEvent.__subclasses__():
        summary = (kind.__doc__ or "").partition("\n")[0]
        parts += [f"## {kind.__struct_config__.tag}", "", summary, "", "| field | type | meaning |", "|---|---|---|"]
        parts += [f"| `{key.key}` | {escape(key.type)} | {escape(key.meaning)} |" for key in list_keys(kind)] + [""]
    return "\n".join(parts)


def make_json_page() -> str:
    from hpcrl.commands.schemas import JSON_OUTPUTS, make_schema

    parts = ["# JSON of commands", ""]
    for name, output in JSON_OUTPUTS.items():
        schema = json.dumps(make_schema(name), indent=2)
        parts += [f"## {name}", "", f"`{output.command}`", "", "```json", schema, "```", ""]
    return "\n".join(parts)


def escape(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("{", "&#123;")
