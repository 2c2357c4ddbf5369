"""The operating system: files, processes, addresses, terminals.

files       files that are complete or absent
file_watch  follow shared files with few operations
file_systems  which of them the nodes share
free_space  what the file system and quotas leave
processes   processes that this one started
pulse       whether a worker stands still, or does not work
memory      the processes that the kernel ended for a lack of memory
near_cores  the cores near a GPU
network     names, addresses, ports
tls         a certificate that only one user's processes have
csv_tables  refuse files that are not CSV
json_numbers  which numbers JSON can represent
json_records  decode JSON as a type
terminal    text that is safe to print
output_encoding  what the locale can show
interrupts  Ctrl-C while a process becomes another program
garbage     the collector while a process starts
package_names  which installed packages have a module
byte_locks  locks that end with their processes
gpu_shifts  the locks of GPUs that several processes use in turns
wakeups     end waits for files of other processes early
exit_codes  why a worker ended
variables   environment variables between processes
package_range  the versions of packages that hpcrl works with
"""
