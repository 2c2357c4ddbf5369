"""Environments in separate processes and sandboxes.

process           an environment in a child process
child             the child process
wire              the messages between them
sandbox           apptainer or bubblewrap around a process
images            the images of apptainer, and a node's cache of them
supervisor        run an agent program and its judge, each in a sandbox, and end what exceeds a limit
program_launcher  run one of them inside its sandbox
"""
