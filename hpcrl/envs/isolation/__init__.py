"""Sandboxes of environments and agent programs; nothing here depends on environments.

sandbox           apptainer or bubblewrap around a process
images            the images of apptainer, and a node's cache of them
supervisor        run an agent program and its judge, each in a sandbox, and end what exceeds a limit
syscall_filter    the system calls for memory that no watcher sees, denied in a sandbox
program_launcher  run one of them inside its sandbox
"""
