"""hpcrl: agentic-RL campaigns on Slurm supercomputers."""

__version__ = "0.1.0"
