"""Turn a recipe and a site into a plan. Pure.

plan        the plan, and make_plan
checks      the consistency of a recipe
router_replay  whether the experts that engines choose can be replayed
demand      the cores and memory that a role needs on a node
engine_gpus   the GPUs of an engine
engine_nodes  engines that are larger than a node
gpu_shifts  GPUs that trainer and engines use in turns
partitions  the best partition for one role
layout      the placement of all roles: hetjob, hetstep, colocated, multi-job, local
sizing      the number of workers where the recipe leaves it open
job_time    the least time of a job against its walltime
storage     the space for checkpoints, weights and trajectories, and its growth
trainer_ranks   the division of the model over the trainer's ranks, where the recipe leaves it open
trainer_checks  what trainer "megatron" lacks, and shares without trajectories
training_work   the work of a training step, with what ranks send each other
trainer_memory  the memory of the trainer's GPUs and nodes
engine_memory   that of the engines'
programs    the programs of agents against the memory of their nodes
records     recipe, site and plan of a campaign, read again
suggestions  other plans for a recipe and a site, with their cost
components  het groups and sbatch flags of a finished layout
"""
