"""What the operating system offers.

files       files that are complete or absent
processes   processes that we started
network     names, addresses, ports
terminal    text that is safe to print
exit_codes  why a worker ended
variables   environment variables between processes
"""
