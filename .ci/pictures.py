"""Make the pictures of the documents from a real campaign: `make pictures`, on a machine with the lab's packages.

The quickstart runs on the lab; its screen is taken while it trains, its report when it has ended, and its plan becomes
the picture of the architecture.
"""

import html
import io
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from hpcrl.campaign.directory import find_campaign
from hpcrl.campaign.request import load_request
from hpcrl.commands.planning import print_plan
from hpcrl.monitor.collect import SnapshotCollector, make_slurm_query
from hpcrl.monitor.screen import render_screen
from hpcrl.monitor.view import FINAL_STATES
from hpcrl.plan.plan import Plan
from hpcrl.plan.records import read_site
from hpcrl.report.page import find_chromium

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "pictures"
NAME, SITE = "quickstart-1", "lab"
WIDTH, HEIGHT = 96, 28
SHOWN_SHARE = 0.7
"""The share of the steps after which the screen is taken."""
MAX_BYTES = 300_000


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="hpcrl-pictures-") as home:
        os.environ["HPCRL_HOME"] = home
        run_hpcrl("lab", "up")
        request = load_request("quickstart", site=SITE)
        console = make_recorder()
        print_plan(request.plan, console)
        save_terminal(console, "plan", "hpcrl plan quickstart --site lab")
        (PICTURES / "architecture.svg").write_text(draw_architecture(request.plan))
        run_hpcrl("submit", "quickstart", "--site", SITE, "--name", NAME)
        take_screen()
        page = Path(home) / "report.html"
        run_hpcrl("report", NAME, "-o", str(page))
        take_page(page)
    num_bytes = sum(path.stat().st_size for path in PICTURES.iterdir())
    sys.stdout.write(f"{PICTURES}: {num_bytes:,} bytes, at most {MAX_BYTES:,} are allowed\n")
    return int(num_bytes > MAX_BYTES)


def run_hpcrl(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "hpcrl.cli", *words], check=True)


def take_screen() -> None:
    """Save the monitor's screen in the middle of the campaign, and wait for its end."""
    campaign = find_campaign(NAME)
    collector = SnapshotCollector(campaign, query=make_slurm_query(read_site(campaign)))
    is_taken = False
    while (snapshot := collector.poll()).state not in FINAL_STATES:
        if not is_taken and snapshot.step >= SHOWN_SHARE * (snapshot.num_steps or 0):
            console = make_recorder()
            console.print(render_screen(snapshot, height=HEIGHT))
            save_terminal(console, "monitor", f"hpcrl monitor {NAME}")
            is_taken = True
        time.sleep(0.5)


def make_recorder() -> Console:
    return Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, highlight=False, emoji=False)


def save_terminal(console: Console, name: str, title: str) -> None:
    """Save what was printed; its letters are those of the reader's machine, so that nothing is loaded."""
    svg = re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title=title), flags=re.DOTALL)
    (PICTURES / f"{name}.svg").write_text(re.sub(r"[ \t]+$", "", svg, flags=re.MULTILINE))


def take_page(page: Path) -> None:
    command = [
        find_chromium() or "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
        "--window-size=1000,1100", f"--screenshot={PICTURES / 'report.png'}", page.as_uri(),
    ]  # fmt: skip
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)


def draw_architecture(plan: Plan) -> str:
    """Draw the components of a plan as boxes, with the ways of trajectories and weights between them."""
    boxes = {role: component for component in plan.components for role in component.roles}
    places = {"env": (20, 170), "prefill": (20, 40), "decode": (300, 40), "train": (580, 40)}
    parts = []
    for role, (x, y) in places.items():
        component = boxes[role]
        roles = " + ".join(component.roles)
        num_workers = next(one.num_workers for one in plan.roles if one.role == role)
        lines = [roles, f"partition {component.partition}", f"{component.nodes} node, {num_workers} worker of {role}"]
        parts.append(f'<rect x="{x}" y="{y}" width="230" height="84" rx="8" class="box"/>')
        parts += [
            f'<text x="{x + 12}" y="{y + 26 + 22 * number}" class="{"head" if number == 0 else "line"}">'
            f"{html.escape(line)}</text>"
            for number, line in enumerate(lines)
        ]
    for x1, y1, x2, y2, label, x, y in WAYS:
        parts.append(f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" class="way" marker-end="url(#tip)"/>')
        parts.append(f'<text x="{x}" y="{y}" class="note">{label}</text>')
    return ARCHITECTURE.format(parts="\n".join(parts))


WAYS = (
    (250, 82, 298, 82, "KV", 262, 74),
    (135, 168, 135, 126, "turns", 141, 152),
    (250, 200, 414, 126, "turns", 346, 172),
    (250, 235, 578, 235, "groups of trajectories, durable", 320, 228),
    (695, 210, 695, 126, "scored trajectories", 572, 172),
)
"""Lines with their labels: x1, y1, x2, y2, text, and its x and y."""

ARCHITECTURE = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 830 280" role="img"
  aria-label="The components of a job, and what goes between them">
<style>
text {{ font-family: sans-serif; fill: #1b1f24; font-size: 14px }}
.head {{ font-weight: bold; font-size: 16px }} .note {{ font-size: 12px; fill: #57606a }}
.box {{ fill: #eaf2fb; stroke: #2f6fb3 }} .disk {{ fill: #f3efe2; stroke: #8a6d1f }}
.way, .weights {{ stroke: #57606a; stroke-width: 1.6; fill: none }}
.weights {{ stroke: #2f6fb3; stroke-dasharray: 5 4 }}
</style>
<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="6" refY="3" orient="auto">
<path d="M0,0 L6,3 L0,6 z" fill="#57606a"/></marker></defs>
<rect width="830" height="280" fill="#ffffff"/>
{parts}
<rect x="580" y="210" width="230" height="50" rx="8" class="disk"/>
<text x="592" y="240" class="line">spools on the shared disk</text>
<path d="M 578 82 L 532 82" class="weights" marker-end="url(#tip)"/>
<path d="M 660 40 C 620 8, 190 8, 140 37" class="weights" marker-end="url(#tip)"/>
<text x="330" y="12" class="note">new weights, while engines generate</text>
</svg>
"""

if __name__ == "__main__":
    sys.exit(main())
