"""Why a job waits or ended: Slurm's words in plain ones."""

import re

_REASONS = {
    "Priority": "jobs of higher priority are ahead of it",
    "Resources": "it is next and waits for nodes to become free",
    "Dependency": "it waits for another job to end",
    "DependencyNeverSatisfied": "the job it waits for can never satisfy it: cancel it",
    "BeginTime": "its earliest start time has not come (a requeued job waits about two minutes)",
    "JobHeldUser": "it is held: `scontrol release` lets it go",
    "JobHeldAdmin": "an administrator holds it",
    "PartitionDown": "its partition is down",
    "PartitionInactive": "its partition is inactive",
    "PartitionNodeLimit": "it asks for more nodes than its partition allows",
    "PartitionTimeLimit": "it asks for more time than its partition allows",
    "ReqNodeNotAvail": "nodes that it needs are down, drained or reserved (often: for maintenance)",
    "Reservation": "it waits for its reservation to begin",
    "Licenses": "it waits for a licence",
    "InvalidAccount": "its account is not valid here",
    "InvalidQOS": "its QOS is not valid here",
    "QOSNotAllowed": "its QOS is not allowed for this account or partition",
    "JobArrayTaskLimit": "too many tasks of its array are running",
    "BadConstraints": "no node satisfies its constraints",
    "Cleaning": "its earlier run is being cleaned up",
    "Prolog": "the nodes are being prepared",
    "NonZeroExitCode": "it ended with a non-zero exit code",
}
_LIMITS = (
    # Slurm composes these names (QOSMaxJobsPerUserLimit, AssocGrpGRESMinutes, ...), so they go by their beginning.
    ("QOSMax", "you are at a limit of its QOS"),
    ("QOSGrp", "all users of its QOS together are at a limit"),
    ("QOSMin", "it asks for less than its QOS wants"),
    ("QOS", "a limit of its QOS"),
    ("AssocGrp", "its account is at a limit"),
    ("AssocMax", "you are at a limit of its account"),
    ("Assoc", "a limit of its account"),
    ("MaxMemPerLimit", "it asks for more memory per node or core than is allowed"),
)


def plain_reason(reason: str) -> str:
    """Slurm's reason in plain words; one that is not known here is passed on."""
    word = re.split(r"[,:(\s]", reason.strip("() "), maxsplit=1)[0]
    if word in _REASONS:
        return _REASONS[word]
    for beginning, words in _LIMITS:
        if word.startswith(beginning):
            return f"{words} ({word})"
    return reason
