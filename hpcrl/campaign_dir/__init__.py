"""The files that the processes of a campaign share.

paths      the path of every file of a campaign and of a job
campaign_format  the number of the format of its directory
train_progress  the progress of the trainer, for the driver
train_limits    the lower limits of a trainer that ran out of memory
campaign_lease  the lease that lets one driver run a campaign
workers    the identity and place of a worker
endpoints  the engine workers that serve now
event_log  append and read events as JSON lines
events     the events
job_end    how a job ended, and why
checkpoints     the names of checkpoints, and the manifest of one
"""
