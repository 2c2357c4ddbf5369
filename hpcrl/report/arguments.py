"""The command line of `hpcrl report`; it imports nothing heavy.

add_arguments    the arguments
FORMATS          the forms of a report
"""

import argparse
from pathlib import Path

FORMATS = ("html", "json", "inspect")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("campaigns", metavar="CAMPAIGN", nargs="+", help="several are compared")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="the page (default: CAMPAIGN-report.html); its JSON is beside it",
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, write no page")
    parser.add_argument("--png", action="store_true", help="also a picture of its top for slides, if Chromium is found")
    parser.add_argument(
        "--format", choices=FORMATS, default="html", help="inspect: logs for `inspect view`, in the directory of -o"
    )
