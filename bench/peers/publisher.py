"""Publish versions into the window of this node, as a trainer does: `python -m bench.peers.publisher CAMPAIGN NODE`.

The first line of its input is the layout as JSON, every further line the number of a version.
"""

import sys
from contextlib import closing
from pathlib import Path

import msgspec

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.testing.nodes import publish
from hpcrl.weights.layout import TensorLayout
from hpcrl.weights.window.file import WindowKey
from hpcrl.weights.window.window import Window


def main(root: Path, node: str) -> None:
    campaign = CampaignDir(root)
    layout = msgspec.json.decode(sys.stdin.readline(), type=TensorLayout)
    with closing(Window.create(WindowKey(campaign=root, node=node), layout, job=campaign.job(0))) as window:
        for line in sys.stdin:
            publish(window, int(line))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
