"""Run the interchange of Parsl until its driver ends: `python -m hpcrl.job.interchange`.

Parsl's own one waits forever for a driver that was killed. The guardian ends it then, unless it was killed as well.
"""

import signal

from hpcrl.job.parsl_programs import load_program, use_steady_time
from hpcrl.system.processes import die_with_parent

if __name__ == "__main__":
    die_with_parent(signal.SIGKILL)
    use_steady_time()
    exec(load_program("parsl.executors.high_throughput.interchange"))
