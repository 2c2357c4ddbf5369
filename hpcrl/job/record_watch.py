"""Report a recipe or a site that was edited by hand: processes that start from then on read it.

RecordWatch   looks at them, and reports each edit once
"""

from collections.abc import Callable

from hpcrl.campaign_dir.events import CampaignEvent, FaultReported
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.plan.records import list_edited_records


class RecordWatch:
    """Watches the records of a campaign for edits."""

    def __init__(self, campaign: CampaignDir, *, emit: Callable[[CampaignEvent], object]) -> None:
        self._campaign = campaign
        self._emit = emit
        self._reported: list[str] = []

    def look(self) -> None:
        """Emit a fault for records that were edited since the last look."""
        try:
            edited = list_edited_records(self._campaign)
        except (OSError, ValueError):  # the file system is away; a damaged manifest ends what needs it
            return
        if edited and edited != self._reported:
            detail = f"{' and '.join(edited)} was edited after the submission: what starts from now on uses it"
            self._emit(FaultReported(what="records", detail=detail))
        self._reported = edited
