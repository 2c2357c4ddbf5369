"""The commands about campaigns on the login node.

lifecycle    submit, dry run, resume, stop
model_check  what would refuse the model in the job, as a command
directory    find, list and reserve campaign directories
"""
