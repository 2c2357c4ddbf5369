"""A campaign as the login node sees it.

lifecycle  submit, dry run, resume, stop
directory  find, list and reserve campaign directories
"""
