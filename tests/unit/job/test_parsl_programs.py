"""Programs of Parsl, and a driver, import it without what they do not use."""

import subprocess
import sys

IMPORT_KERNEL = """
import sys
from hpcrl.job.parsl_programs import skip_database
with skip_database():
    import hpcrl.job.executors
assert not [name for name in sys.modules if name.startswith("sqlalchemy")]
assert "parsl.monitoring.db_manager" not in sys.modules
import parsl
parsl.DataFlowKernel, parsl.HighThroughputExecutor
"""


IMPORT_AGAIN = """
import sys
from hpcrl.job.parsl_programs import import_whole, load_program
exec(load_program("parsl.executors.high_throughput.process_worker_pool"), {"__name__": "pool"})
own = {name: module for name, module in sys.modules.items() if name.startswith("parsl")}
with import_whole():
    import parsl.executors.high_throughput
    import parsl.serialize
    parsl.serialize, parsl.multiprocessing, parsl.executors.high_throughput, parsl.HighThroughputExecutor, parsl.version
assert own == {name: module for name, module in sys.modules.items() if name.startswith("parsl")}
with import_whole():
    assert sys.modules["parsl"] is parsl
"""


def test_code_of_a_user_finds_all_of_parsl_in_a_worker_which_keeps_its_own():
    subprocess.run([sys.executable, "-c", IMPORT_AGAIN], check=True, timeout=60)


def test_a_driver_imports_parsl_without_a_database():
    subprocess.run([sys.executable, "-c", IMPORT_KERNEL], check=True, timeout=60)
