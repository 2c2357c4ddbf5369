"""What a KV connector of vLLM is told so that engines find each other: ours, or one of vLLM's own by its name. Pure.

    build_connector_config                `--kv-transfer-config`
    build_connector_env                   where a connector of vLLM's own listens
    make_leave_params, make_fetch_params  what a request says: leave the KV of its prompt, or begin with what was left
    read_transfer_params                  what whoever fetches it has to know

Written after vLLM's source; only our own connector has been run.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

OUR_CONNECTOR = "files"
MOONCAKE = "MooncakeConnector"
Address = tuple[str, int]


def build_connector_config(connector: str, *, options: Mapping[str, Any], address: Address | None) -> dict[str, Any]:
    """For one of vLLM's own; its engine is called as it is found, so that others can name it."""
    named = {"engine_id": format_address(address)} if address else {}
    return named | _BOTH_ROLES | {"kv_connector": connector, "kv_connector_extra_config": dict(options)}


def build_files_config(directory: Path, *, version_file: Path) -> dict[str, Any]:
    """For ours, which leaves KV in a directory."""
    return _BOTH_ROLES | {
        "kv_connector": "FilesConnector",
        "kv_connector_module_path": "hpcrl.engines.vllm.kv_files_connector",
        "kv_connector_extra_config": {"directory": str(directory), "version_file": str(version_file)},
    }


def build_connector_env(address: Address | None) -> dict[str, str]:
    """None: nobody needs to find it from outside."""
    if address is None:
        return {"VLLM_HOST_IP": "127.0.0.1"}
    host, port = address
    return {
        "VLLM_HOST_IP": host,  # Mooncake's address is this one
        "VLLM_NIXL_SIDE_CHANNEL_HOST": host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
        "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(port),
    }


def make_leave_params(name: str) -> dict[str, Any]:
    """Leave the KV of the prompt under a name; Mooncake calls that a transfer."""
    return {"do_remote_decode": True, "do_remote_prefill": False, "name": name, "transfer_id": name}


def make_fetch_params(transfer: Mapping[str, Any] | None) -> dict[str, Any]:
    """Begin with what was left."""
    return {**(transfer or {}), "do_remote_prefill": True, "do_remote_decode": False}


def read_transfer_params(
    connector: str, answer: Mapping[str, Any], *, name: str, address: Address | None
) -> dict[str, Any] | None:
    """As the answer to `make_leave_params` says; of Mooncake, which says nothing, what its other end asks for. None: not left."""
    params = answer.get("kv_transfer_params")
    if params:
        return dict(params) if params.get("saved", True) else None
    if connector != MOONCAKE or address is None:
        return None
    host, port = address
    return {
        "transfer_id": name,
        "remote_engine_id": format_address(address),
        "remote_bootstrap_addr": f"http://{host}:{port}",
    }


def format_address(address: Address) -> str:
    host, port = address
    return f"{host}:{port}"


_BOTH_ROLES = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
