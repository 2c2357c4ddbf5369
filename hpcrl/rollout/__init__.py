"""Run episodes: the work of an env worker.

episode           one episode, turn by turn
turn              one turn, across interruptions
thoughts          prompts without the thoughts of earlier answers
episode_accounts  what follows when episodes start and end
groups            groups of episodes and how they ended
admission         how many groups may start
tasks             seeds, numbers and domains of tasks
task_sets         the rows of domains with `tasks`
task_queue        the next task, with environments prepared ahead
fault_budget      how many faults of an environment are tolerated
curriculum        weights of domains, by a user's function
flow_control      how env workers and the trainer wait for each other
rollout_spool     the groups that are released, until they are durable
journal           the running episodes, on disk
reporting         counters and events of the worker
evaluation        rounds of evaluation
rewards           a domain's reward function, and the score of an episode
quick_rewards     rewards that the worker gives itself
teacher_scores    the log-probs of a judge that is the teacher
reward_process    the process that computes the rewards of a worker
trajectory_scorer  the rewards of single trajectories, of evaluations
reward_calls      the calls of reward functions in children, which are killed when they hang
http_server       serves a handler on a port
judge_outages     which judges are gone, or were
judges            second models that rewards and environments call
routing           which engine serves a turn
agents            the OpenAI API for agent programs
"""
