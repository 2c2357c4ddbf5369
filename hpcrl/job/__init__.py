"""Start, supervise and end the workers of a job. No data passes through this package.

driver           supervise the workers
own_lease        let one driver run a campaign
next_job_queue   queue the job that follows
job_drain        the drain of the job, and who asked for it
job_workers      start the workers, also again
supervision      requests to end, the time to drain, failures that repeat
progress_watch   find out whether the job has stalled
domain_watch     find out that no domain trains anything
record_watch     report a recipe or site that was edited by hand
memory_watch     lower limits of a trainer that ran out of memory
batch_log        notes in the log of the batch script
component_holder  hold the nodes of a component in a separate job
guardian         run the driver and clean up after it
driver_pulse     find out that the driver hangs
runtime          start the trainer, and the workers of other roles
executors        executors of Parsl for roles and reward jobs
parsl_providers  Parsl blocks as steps and as jobs
interchange      the interchange of Parsl, which ends with the driver
worker_pool      the worker pool of Parsl
fork_server      the process from which the workers of a pool are forked
pool_queue       what goes between a pool and its workers, any of which may be killed
parsl_programs   import no more of Parsl than is used
courier_step     start, watch and restart the couriers
reward_tasks     one task per shard, and the number of reward jobs
metrics_process  start and restart the metrics process
metrics_export   send figures to trackers, during a job and afterwards
metric_sinks     the trackers: TensorBoard, W&B, MLflow
job_notices      report start and end of the job to people
step             run one command of a step
ranks            start the ranks of a step on one node
trainer_end      find which rank has ended the trainer, and why
"""
