"""The programs of the workers of a job; roles communicate only through files, HTTP, and wake-ups.

__main__        the entry point of every worker
context         the campaign, the plan and the events as one worker sees them
gpu_shifts      GPUs that the trainer and engines use in turns
env             play episodes
episode_runner  the running episodes of an env worker
episode_player  an episode or an agent program, in training and in evaluations
program_proxy   the endpoint for agent programs
reward          score finished segments
serve           serve an engine, for prefill or decode
judge           serve a judge
train           train and publish weights
memory_limits   the limits of the trainer's memory, and what they leave out
learning_evidence  the signs that anything was learned
train_queue     trajectories that wait to be trained on
warmup          conversations of a data file, for the first steps
warmup_check    counts those that are too long, before submission
"""
