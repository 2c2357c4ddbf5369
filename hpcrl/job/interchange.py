"""Run the interchange of Parsl until its driver ends: `python -m hpcrl.job.interchange`.

Parsl's own one waits forever for a driver that was killed. The guardian ends it then, unless it was killed as well.
"""

import runpy
import signal

from hpcrl.system.processes import die_with_parent

if __name__ == "__main__":
    die_with_parent(signal.SIGKILL)
    runpy.run_module("parsl.executors.high_throughput.interchange", run_name="__main__", alter_sys=True)
