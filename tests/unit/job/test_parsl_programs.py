"""A driver imports Parsl without what it does not use."""

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


def test_a_driver_imports_parsl_without_a_database():
    subprocess.run([sys.executable, "-c", IMPORT_KERNEL], check=True, timeout=60)
