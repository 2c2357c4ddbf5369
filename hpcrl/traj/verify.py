"""`hpcrl traj verify`: every segment of every spool, every checksum, and whether all that was consumed is still there.

damage    bytes, names or contents are not as they were written, or something is missing: exit code 1
note      worth knowing, and as it should be: duplicates that readers drop, files that are no segments
"""

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from hpcrl.rundir import RunDir
from hpcrl.traj.inspection import Inspection, Report
from hpcrl.traj.text import in_line, make_console, print_json, size

EXIT_DAMAGE = 1
NUM_SHOWN = 100


def verify(run: RunDir, *, as_json: bool) -> int:
    """Look at everything and print the report; the exit code says whether there is damage."""
    report = Inspection(run).report_of_all()
    if as_json:
        print_json(report)
    else:
        _print(make_console(), report)
    return 0 if report.clean else EXIT_DAMAGE


def _print(console: Console, report: Report) -> None:
    console.print(_totals(report))
    if report.consumed:
        console.print(Text("consumed  ", style="dim") + Text(report.consumed))
    damages = [finding for finding in report.findings if finding.severity == "damage"]
    notes = [finding for finding in report.findings if finding.severity == "note"]
    for finding in [*damages, *notes[:NUM_SHOWN]]:
        style = "bold red" if finding.severity == "damage" else "yellow"
        console.print()
        whole_lines = not console.is_terminal
        console.print(Text.assemble((finding.severity, style), "  ", in_line(finding.path)), soft_wrap=whole_lines)
        console.print(Padding(Text(in_line(finding.reason)), (0, 0, 0, 2)), soft_wrap=whole_lines)
    if len(notes) > NUM_SHOWN:
        console.print(f"\nand {len(notes) - NUM_SHOWN:,} more notes: --json has them all", style="dim")
    console.print()
    if report.clean:
        console.print(
            Text.assemble(("clean", "bold green"), f"  {in_line(report.campaign)}: nothing is damaged or missing")
        )
    else:
        found = "1 finding" if len(damages) == 1 else f"{len(damages):,} findings"
        console.print(Text.assemble(("damage", "bold red"), f"  {in_line(report.campaign)}: {found}"))


def _totals(report: Report) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("spool", no_wrap=True)
    for heading in ("segments", "trajectories", "size", "duplicates", "damaged"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, totals in report.spools.items():
        table.add_row(
            Text(name),
            f"{totals.num_segments:,}",
            f"{totals.num_trajectories:,}",
            size(totals.num_bytes),
            f"{totals.num_duplicates:,}",
            Text(f"{totals.num_damaged:,}", style="bold red" if totals.num_damaged else ""),
        )
    return table
