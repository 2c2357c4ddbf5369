"""The episodes that a campaign has played, as its trajectories recorded them (`read_campaign_traces`)."""

from hpcrl.campaign import directory
from hpcrl.errors import CampaignError
from hpcrl.simulation.workload import EpisodeScript, TurnScript
from hpcrl.spool.reader import DiskSpoolReader
from hpcrl.spool.record import TRAINABLE, TrajectoryFacts


def read_campaign_traces(name: str) -> list[EpisodeScript]:
    """Read the episodes of a campaign that ended normally; CampaignError if there are none."""
    campaign = directory.find_campaign(name)
    scripts: dict[str, EpisodeScript] = {}
    for spool in ("scored", "archive"):
        reader = DiskSpoolReader(campaign.spool(spool), on_damage=lambda *_: None)
        for trajectory in reader.poll():
            if trajectory.status in TRAINABLE and trajectory.turns and not trajectory.rows:
                scripts[trajectory.id] = make_script(trajectory)
    if not scripts:
        raise CampaignError(f"campaign {name} has no scored episodes of one conversation: let it run longer")
    return [scripts[id] for id in sorted(scripts)]


def make_script(facts: TrajectoryFacts) -> EpisodeScript:
    """Return the lengths and times of an episode."""
    turns, known = [], 0
    for turn in facts.turns:
        turns.append(TurnScript(max(1, turn.start - known), max(1, turn.end - turn.start), turn.step_s))
        known = turn.end
    return EpisodeScript(facts.reset_s, tuple(turns))
