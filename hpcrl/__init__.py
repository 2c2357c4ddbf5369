"""hpcrl: agentic-RL campaigns as one heterogeneous Slurm job. docs/architecture.md has the picture.

cli           start a command
commands      the commands of the login node, and what they print
trial         a few episodes of each domain, without a campaign
simulation    campaigns of any size, in simulated time
errors        every error that hpcrl raises
config        what a user writes: recipes, sites, the pipeline
hardware      facts about GPUs, and what models need of them
plan          recipe and site become a plan
campaign      submit, resume, stop and find campaigns, on a login node
campaign_dir  what the processes of a campaign share on disk
job           inside a job: the driver, its guardian and what they start
slurm         the commands of Slurm
staging       models, data and images brought to a site
doctor        a site file beside the machine that it describes
lab           a real Slurm on one machine
roles         what each worker runs
rollout       the work of an env worker
engines       what generates tokens
models        what a model directory holds
learn         advantages, losses, the division of a step
trainers      torch and Megatron-core
weights       new weights from the trainer to every engine
spool         trajectories on disk
envs          environments
monitor       the state of a campaign, on a screen
report        a page about campaigns
traj          trajectories for people
system        files, processes, network
testing       stand-ins that ship with hpcrl for tests of one's own
"""

__version__ = "0.1.0"
