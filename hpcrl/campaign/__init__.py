"""The commands about campaigns on the login node.

lifecycle  submit, dry run, resume, stop
directory  find, list and reserve campaign directories
"""
