"""The commands about campaigns on the login node.

lifecycle         submit, dry run, stop
continuation      resume and extend, also with changes
fixed_settings    the settings that no change may touch
model_check       a command that checks a model as the job would
surplus           files that a campaign no longer needs
directory         find, list and reserve campaign directories
"""
