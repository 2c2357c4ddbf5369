"""Submit jobs to Slurm and query their state.

commands    run Slurm's commands
script      the batch script of a job
submit      submit, interrupt and cancel a job
allocation  nodes and end time of the current job
component_jobs  separate jobs for components
next_job    queue and cancel the next job of a campaign
end_policy  what follows the end of a job, by its cause
step_script  what steps of a partition start with
site_detection  describe a cluster as a site
status      states and reasons in plain words
"""
