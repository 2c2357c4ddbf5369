"""The episodes that a campaign has played, as its trajectories recorded them.

read_campaign_traces    those that ended normally, and how often each is drawn
weigh_by_cuts           how many episodes each stands for, where others were cut off
make_script             the lengths and times of an episode

Only episodes that ended normally are recorded. Of those that were cut off, since their group needed no more or they
grew too old, most are long, so that the recorded ones are too short: each stands also for some that were cut off before
they were as long as it (the estimate of Kaplan and Meier).
"""

from collections.abc import Mapping, Sequence

from hpcrl.campaign import directory
from hpcrl.campaign_dir.event_log import EventReader
from hpcrl.campaign_dir.events import EpisodesCounted
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.errors import CampaignError
from hpcrl.monitor.progress import CampaignProgress
from hpcrl.simulation.workload import EpisodeScript, RecordedEpisodes, TurnScript
from hpcrl.spool.episode_lengths import count_lengths
from hpcrl.spool.reader import DiskSpoolReader
from hpcrl.spool.record import TRAINABLE, TrajectoryFacts


def read_campaign_traces(name: str, *, seed: int = 0) -> RecordedEpisodes:
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
    found = [scripts[id] for id in sorted(scripts)]
    lengths = [sum(turn.num_reply for turn in script.turns) for script in found]
    return RecordedEpisodes(found, seed, weights=weigh_by_cuts(lengths, _read_cuts(campaign, num=len(found))))


def weigh_by_cuts(lengths: Sequence[int], cuts: Mapping[float, float]) -> list[float]:
    """Return how many episodes each finished one stands for, itself included.

    `cuts` has how many were cut off by the length that they had reached; an episode of just that length had finished.
    """
    weights = [0.0] * len(lengths)
    ends = sorted((length, place) for place, length in enumerate(lengths))
    num_left, share, waiting = len(ends) + sum(cuts.values()), 1.0, sorted(cuts.items(), reverse=True)
    for length, place in ends:
        while waiting and waiting[-1][0] < length:
            _, num = waiting.pop()
            share *= num_left / (num_left - num)
            num_left -= num
        weights[place] = share
        num_left -= 1
    return weights


def make_script(facts: TrajectoryFacts) -> EpisodeScript:
    """Return the lengths and times of an episode."""
    turns, known = [], 0
    for turn in facts.turns:
        turns.append(TurnScript(max(1, turn.start - known), max(1, turn.end - turn.start), turn.step_s))
        known = turn.end
    return EpisodeScript(facts.reset_s, tuple(turns))


def _read_cuts(campaign: CampaignDir, *, num: int) -> Mapping[float, float]:
    """Return how many episodes were cut off by their mean length, for each `num` that finished."""
    progress = CampaignProgress()
    for event in EventReader(campaign.events).poll_merged():
        if isinstance(event, EpisodesCounted):
            progress.add(event)
    cuts, finished = dict[float, float](), 0
    for status, counts in progress.lengths.items():
        for length, episodes in count_lengths(counts):
            if status in TRAINABLE:
                finished += episodes
            else:
                cuts[length] = cuts.get(length, 0.0) + episodes
    return {length: episodes * num / finished for length, episodes in cuts.items()} if finished else {}
