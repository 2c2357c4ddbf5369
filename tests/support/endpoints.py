"""The endpoints of all tests.

make_endpoint  that of an engine worker, whose role is in its name
"""

from typing import Any

from hpcrl.campaign_dir.endpoints import EngineEndpoint


def make_endpoint(worker: str = "000-decode-0", **changed: Any) -> EngineEndpoint:
    """Make the endpoint of a worker named `JOB-ROLE-NUMBER`; any field may be given."""
    role = worker.partition("-")[2].rpartition("-")[0] or "decode"
    fields: dict[str, Any] = {"role": role, "worker": worker, "node": "n", "url": "http://n", "token": "t"}
    return EngineEndpoint(**{**fields, **changed})
