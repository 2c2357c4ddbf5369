"""Environment variables that the driver sets for the processes that it starts. docs/sites.md lists all."""

PARTITION_VARIABLE = "HPCRL_PARTITION"
"""The partition of a worker that runs outside its role's component: a reward job."""
TRAINER_START_VARIABLE = "HPCRL_TRAINER_START"
"""The number of earlier starts of the trainer in this job: the ranks of one start meet in one file."""
