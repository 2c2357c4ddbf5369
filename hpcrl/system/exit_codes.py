"""The exit codes by which a worker tells its supervisor why it ended."""

EXIT_DONE = 0
EXIT_DRAINED = 3
"""How the trainer's process says that it has checkpointed and the campaign is to go on in another job."""
