"""The errors that hpcrl raises on purpose.

    HpcrlError            what went wrong, the value seen, how to fix it
    ├── ConfigError       a recipe or site file (or a -s setting) that cannot be used
    ├── PlanError         recipe and site do not fit each other
    ├── CampaignError     a campaign that is missing, exists already, or is in the wrong state
    ├── SlurmError        Slurm refused, is missing, or did not answer
    │   └── LostAnswerError   the answer to a submission was lost: the job may be queued
    ├── StageError        what a recipe names could not be brought to the file system of a site
    ├── LabError          the lab (a private Slurm on one machine) could not do what was asked
    ├── SpoolError        trajectories could not be written or read
    ├── WeightsError      a version of the weights could not be published or loaded
    ├── EngineError       an engine could not serve a request
    │   ├── EngineRefusedError  the engine is full: the request is offered to the next one
    │   ├── EngineRequestError  no engine can serve the request: it is not sent again
    │   └── EngineAnswerError   the response of the engine is not valid
    ├── EnvFault          the environment's infrastructure failed: retried, never scored
    │   ├── PolicyFailure  what the policy did made its episode fail: an outcome with a reward
    │   └── TemplateLimitError  the chat template takes too long, or renders too much
    ├── RewardError       the process that computes rewards ended
    └── TrainError        training cannot continue
        ├── LostCheckpointsError  no checkpoint can be read: another start would find the same
        └── NodeResultError  a user's node of the pipeline returns what the next one cannot use

`show_error` returns the type and the message of any exception.

The command line prints the message alone and exits with 2; anything else is a bug and keeps its traceback.
"""


class HpcrlError(Exception):
    """The base class: its message names what went wrong, the value seen, and how to fix it, in the user's terms."""


class ConfigError(HpcrlError):
    """A recipe or site file (or a -s setting) cannot be used."""


class PlanError(HpcrlError):
    """Recipe and site do not fit each other."""


class CampaignError(HpcrlError):
    """A campaign is missing, exists already, or is in the wrong state."""


class SlurmError(HpcrlError):
    """Slurm refused, is missing, or did not answer."""


class LostAnswerError(SlurmError):
    """Slurm's answer to a submission was lost, and its queue shows no such job: it may be queued all the same."""


class StageError(HpcrlError):
    """Files that a recipe names could not be brought to the file system of a site."""


class LabError(HpcrlError):
    """The lab could not do what was asked."""


class SpoolError(HpcrlError):
    """Trajectories could not be written or read."""


class WeightsError(HpcrlError):
    """A version of the weights could not be published or loaded."""


class EngineError(HpcrlError):
    """An engine could not serve a request."""


class EngineRefusedError(EngineError):
    """An engine has no room for a request now; the engine and the request are both fine."""


class EngineRequestError(EngineError):
    """The request is one that no engine with this model can serve; the engine is fine."""


class EngineAnswerError(EngineError):
    """An engine responded, but its response is not a valid answer."""


class EnvFault(HpcrlError):
    """The environment's infrastructure failed; the episode is retried and never scored."""


class PolicyFailure(EnvFault):
    """An episode failed by what the policy did: an outcome (hpcrl.spool.outcome), unless nothing was generated yet."""

    def __init__(self, outcome: str, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


class TemplateLimitError(EnvFault):
    """The chat template takes too long for a conversation, or renders too much."""


class RewardError(HpcrlError):
    """The process that computes rewards ended."""


class TrainError(HpcrlError):
    """Training cannot continue."""


class LostCheckpointsError(TrainError):
    """Every checkpoint is damaged, or is of a newer hpcrl: another start would find the same."""


class NodeResultError(TrainError):
    """A user's node of the pipeline returns what the next cannot use: another start would find the same."""


MAX_SHOWN_CHARS = 1000
"""The most characters of an exception's message that are shown."""


def show_error(error: BaseException) -> str:
    """Return the type and the message of an exception; the user's own may have a message that cannot be computed."""
    name = type(error).__name__
    try:
        text = str(error)
    except Exception as inner:  # noqa: BLE001
        return f"{name}, whose __str__ raises {type(inner).__name__}"
    if len(text) > MAX_SHOWN_CHARS:
        text = f"{text[:MAX_SHOWN_CHARS]}..."
    return f"{name}: {text}" if text else name
