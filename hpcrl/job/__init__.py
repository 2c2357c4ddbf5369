"""Inside a job: what starts, watches and ends the workers. No data passes through it.

driver           supervises the workers
guardian         owns the driver and clears up after it
next_job         queues and cancels the next job of the campaign
runtime          Parsl executors
parsl_providers  steps and jobs as Parsl blocks
courier_step     starts, watches and restarts the couriers
reward_tasks     one task per segment, and the number of reward jobs
metrics_process  starts and restarts the metrics process
metrics_export   events to TensorBoard and W&B
step             a worker as a process of a step
ranks            the ranks of a step on one node
"""
