"""The commands about campaigns on the login node.

request           recipe, site and plan, loaded
submission        a campaign's directory, its records, its first and its further jobs
provenance        the versions and revisions of the software that a campaign runs with
submission_checks  what is checked before that
model_check       a command that checks a model as the job would
staged_files      the local paths of models and data named by their id on the hub
own_gpus          the GPUs of this machine, for a site without a scheduler
running_jobs      the states of its jobs, and how to stop them
continuation      resume and extend, also with changes
continuation_checks   what another job must not do
fixed_settings    the settings that no change may touch
surplus           files that a campaign no longer needs
directory         find, list and reserve campaign directories
"""
