"""The commands about campaigns on the login node.

lifecycle         submit, dry run, stop
continuation      resume and extend, also with changes
fixed_settings    the settings that no change may touch
model_check       a command that checks a model as the job would
own_gpus          the GPUs of this machine, for a site without a scheduler
surplus           files that a campaign no longer needs
directory         find, list and reserve campaign directories
"""
