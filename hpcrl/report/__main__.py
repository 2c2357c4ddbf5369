"""Report on campaigns: `python -m hpcrl.report ARGUMENTS -- ROOT ...`."""

import argparse
import contextlib
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.errors import CampaignError
from hpcrl.report.arguments import add_arguments
from hpcrl.report.builder import build_document
from hpcrl.report.figures import ReportDocument, TrajectoryFigures
from hpcrl.report.page import is_page, render_page, write_picture
from hpcrl.system.exit_codes import EXIT_DONE, run_for_code
from hpcrl.system.files import OUTPUT_MODE, find_output, publish_file
from hpcrl.system.output_encoding import follow_locale
from hpcrl.system.processes import do_nothing
from hpcrl.system.terminal import is_terminal, print_json_text, print_to_stderr, show_wait

MAX_PAGE_BYTES = 5_000_000
"""The size above which a page counts as large: mail servers refuse it."""


def main(argv: Sequence[str]) -> int:
    """Run the command; an error that the user can fix is one message and exit code 2."""
    parser = argparse.ArgumentParser(prog="hpcrl report")
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    return run_for_code(lambda: _run_command(arguments, [CampaignDir(Path(root)) for root in arguments.campaigns]))


def _run_command(arguments: argparse.Namespace, campaigns: Sequence[CampaignDir]) -> int:
    if arguments.format == "inspect":
        _write_inspect_logs(campaigns, arguments.output)
        return EXIT_DONE
    show = print_to_stderr if is_terminal(sys.stderr) else do_nothing
    document = build_document(
        campaigns, read_trajectories=partial(_read_trajectories, num_campaigns=len(campaigns)), show_progress=show
    )
    data = msgspec.json.format(msgspec.json.encode(document), indent=1)
    if arguments.json or arguments.format == "json":
        if arguments.output is None:
            print_json_text(data)
        else:
            _publish(arguments.output, data + b"\n")
    else:
        _write_page(document, data, arguments)
    return EXIT_DONE


def _write_page(document: ReportDocument, data: bytes, arguments: argparse.Namespace) -> None:
    names = "-".join(Path(root).name for root in arguments.campaigns)
    page: Path = arguments.output or Path(f"{names[:100]}-report.html")
    if not page.suffix and not page.exists():  # a browser shows a file by its suffix
        page = page.with_name(f"{page.name}.html")
    if page.suffix == ".json":
        raise CampaignError(f"{page} cannot be a page: add --format json, or choose another name with -o")
    twin = page.with_suffix(".json")
    _refuse_foreign_page(page)
    _refuse_foreign_twin(twin)
    text = render_page(document)
    _publish(page, text)
    _publish(twin, data + b"\n")
    sys.stdout.write(f"{page} ({len(text) / 1e6:.1f} MB), the same figures in {twin}\n")
    if len(text) > MAX_PAGE_BYTES:
        print_to_stderr(f"{page} is large, as it has {len(document.campaigns)} campaigns: name fewer to share it")
    for campaign in document.campaigns:
        sys.stdout.write(f"{campaign.name}: {campaign.verdict}\n")
    if arguments.png:
        picture = page.with_suffix(".png")
        with show_wait(f"{picture} is drawn"):
            write_picture(page, picture)
        sys.stdout.write(f"{picture}\n")


def _refuse_foreign_page(page: Path) -> None:
    """Refuse to replace a file that is not a page: its name may be a mistake."""
    with contextlib.suppress(OSError):  # what cannot be read cannot be written either, which is named then
        if page.is_file() and not is_page(page):
            raise CampaignError(f"{page} exists and is not a report: choose another name with -o")


def _refuse_foreign_twin(twin: Path) -> None:
    """Refuse to replace a JSON file that is not a report, as its name was not given."""
    if not twin.exists():
        return
    try:
        is_report = "report" in msgspec.json.decode(twin.read_bytes(), type=dict[str, msgspec.Raw])
    except (OSError, msgspec.DecodeError):
        is_report = False
    if not is_report:
        raise CampaignError(f"{twin} exists and is not a report: choose another name with -o")


def _publish(path: Path, data: bytes | str) -> None:
    try:
        publish_file(find_output(path), data, mode=OUTPUT_MODE)
    except OSError as error:
        raise CampaignError(f"{path} cannot be written ({error.strerror}): choose another file with -o") from error


def _read_trajectories(campaign: CampaignDir, *, num_campaigns: int = 1) -> TrajectoryFigures:
    """Read the trajectories, if this interpreter can; the campaigns of a page share the room for text."""
    try:
        from hpcrl.report.trajectories import MAX_TEXT_BYTES, read_trajectories
    except ModuleNotFoundError as error:
        missing = f"trajectories are not shown: {sys.executable} has no {error.name} (pip install 'hpcrl[local]')"
        return TrajectoryFigures(
            num=0, num_groups=0, num_flat_groups=0, sampled=[], groups=[], charts=[], problems=[], missing=[missing]
        )
    return read_trajectories(campaign, max_text_bytes=MAX_TEXT_BYTES // num_campaigns)


def _write_inspect_logs(campaigns: Sequence[CampaignDir], target: Path | None) -> None:
    from hpcrl.traj.export import export_trajectories
    from hpcrl.traj.history import TrajectoryHistory, TrajectorySelection

    if len(campaigns) != 1:
        raise CampaignError(f"--format inspect writes the logs of one campaign, and {len(campaigns)} are named")
    if target is None:
        raise CampaignError("--format inspect writes a directory: name it with -o DIRECTORY")
    if target.exists():
        command = f"hpcrl traj export {campaigns[0].name} {target} --format inspect --force"
        raise CampaignError(f"{target} exists: choose another directory with -o, or replace it: `{command}`")
    history = TrajectoryHistory(campaigns[0])
    export_trajectories(history, TrajectorySelection(), target=target, kind="inspect", force=False)


if __name__ == "__main__":
    follow_locale()
    sys.exit(main(sys.argv[1:]))
