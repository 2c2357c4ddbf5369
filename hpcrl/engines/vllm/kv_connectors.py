"""What a KV connector of vLLM is told so that engines find each other: ours, or one of vLLM's own by its name. Pure.

    config          `--kv-transfer-config`
    environment     where a connector of vLLM's own listens
    left, fetched   what a request says: leave the KV of its prompt, or begin with what was left
    found           what whoever fetches it has to know

Written after vLLM's source; only our own connector has been run.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

OURS = "files"
MOONCAKE = "MooncakeConnector"
Address = tuple[str, int]


def config(connector: str, *, options: Mapping[str, Any], address: Address | None) -> dict[str, Any]:
    """For one of vLLM's own; its engine is called as it is found, so that others can name it."""
    named = {"engine_id": name_at(address)} if address else {}
    return named | _BOTH | {"kv_connector": connector, "kv_connector_extra_config": dict(options)}


def our_config(directory: Path, *, version_file: Path) -> dict[str, Any]:
    """For ours, which leaves KV in a directory."""
    return _BOTH | {
        "kv_connector": "FilesConnector",
        "kv_connector_module_path": "hpcrl.engines.vllm.kv_files_connector",
        "kv_connector_extra_config": {"directory": str(directory), "version_file": str(version_file)},
    }


def environment(address: Address | None) -> dict[str, str]:
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


def left(name: str) -> dict[str, Any]:
    """Leave the KV of the prompt under a name; Mooncake calls that a transfer."""
    return {"do_remote_decode": True, "do_remote_prefill": False, "name": name, "transfer_id": name}


def fetched(transfer: Mapping[str, Any] | None) -> dict[str, Any]:
    """Begin with what was left."""
    return {**(transfer or {}), "do_remote_prefill": True, "do_remote_decode": False}


def found(connector: str, answer: Mapping[str, Any], *, name: str, address: Address | None) -> dict[str, Any] | None:
    """As the answer to `left` says; of Mooncake, which says nothing, what its other end asks for. None: not left."""
    told = answer.get("kv_transfer_params")
    if told:
        return dict(told) if told.get("saved", True) else None
    if connector != MOONCAKE or address is None:
        return None
    host, port = address
    return {
        "transfer_id": name,
        "remote_engine_id": name_at(address),
        "remote_bootstrap_addr": f"http://{host}:{port}",
    }


def name_at(address: Address) -> str:
    host, port = address
    return f"{host}:{port}"


_BOTH = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
