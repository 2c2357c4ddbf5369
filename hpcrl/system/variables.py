"""Environment variables that the driver sets for the processes that it starts. docs/sites.md lists all."""

PARTITION_VARIABLE = "HPCRL_PARTITION"
"""The partition of a worker that runs outside its role's component: a reward job."""
TRAINER_START_VARIABLE = "HPCRL_TRAINER_START"
"""How many starts of the trainer came before this one in its job: the ranks of one start meet in one file."""
