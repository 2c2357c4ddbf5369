"""Environments in separate processes and sandboxes.

process           an environment in a child process
child             the child process
wire              the messages between them
sandbox           apptainer or bubblewrap around a process
program_launcher  run an agent program in a sandbox
"""
