"""Make a picture of a page with a Chromium that is installed here, for slides.

write_picture     a PNG of the top of a page
find_chromium     the program
"""

import shutil
import subprocess
import tempfile
from pathlib import Path

from hpcrl.errors import CampaignError

CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PICTURE_TIMEOUT_S = 120.0
WIDTH_PX, HEIGHT_PX = 1280, 1600


def find_chromium() -> str | None:
    """Return the path of a Chromium on PATH."""
    return next((path for path in map(shutil.which, CHROMIUM_NAMES) if path), None)


def write_picture(page: Path, picture: Path) -> None:
    """Write a PNG of the top of a page; refuse without Chromium."""
    program = find_chromium()
    if program is None:
        raise CampaignError(
            f"--png needs Chromium, and none of {', '.join(CHROMIUM_NAMES)} is on PATH: "
            f"open {page} in a browser instead"
        )
    with tempfile.TemporaryDirectory(prefix="hpcrl-chromium-") as profile:
        command = [
            program, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            "--force-device-scale-factor=2", f"--user-data-dir={profile}", f"--window-size={WIDTH_PX},{HEIGHT_PX}",
            f"--screenshot={picture.absolute()}", page.absolute().as_uri(),
        ]  # fmt: skip
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=PICTURE_TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CampaignError(f"{program} made no picture of {page}: {error}") from error
    if done.returncode or not picture.exists():
        last = done.stderr.strip().rpartition("\n")[2]
        raise CampaignError(f"{program} made no picture of {page} (exit code {done.returncode}): {last}")
