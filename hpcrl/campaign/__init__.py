"""The commands about campaigns on the login node.

lifecycle    submit, dry run, resume, stop
model_check  a command that checks a model as the job would
directory    find, list and reserve campaign directories
"""
