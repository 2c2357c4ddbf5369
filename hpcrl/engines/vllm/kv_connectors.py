"""Configuration of vLLM's KV connectors, so that engines find each other: ours, or one of vLLM's by its name. Pure.

    build_connector_config, build_files_config  `--kv-transfer-config` for one of vLLM's connectors, and for ours
    build_connector_env                         the address at which one of vLLM's connectors listens
    choose_connector                            the connector of a site that leaves it open
    make_leave_params, make_fetch_params        request parameters: store the KV of the prompt, or start with such KV
    read_transfer_params                        parameters that the fetching engine needs
    Address, format_address                     a host and port
    NIXL, MOONCAKE, CONNECTOR_PACKAGES          names of connectors, and their packages

Written from vLLM's source; only our own connector has been run.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hpcrl.config.site import AUTO_CONNECTOR, OUR_CONNECTOR

NIXL, MOONCAKE = "NixlConnector", "MooncakeConnector"
CONNECTOR_PACKAGES = {NIXL: "nixl", MOONCAKE: "mooncake"}
"""The packages that vLLM imports for its connectors between nodes, the better one first."""
Address = tuple[str, int]


def choose_connector(asked: str | None, *, has_network: bool, has_package: Callable[[str], bool]) -> str | None:
    """Return the connector of a site; `has_network`: engines have GPUs, and a fabric between their nodes."""
    if asked != AUTO_CONNECTOR:
        return asked
    found = (name for name, package in CONNECTOR_PACKAGES.items() if has_network and has_package(package))
    return next(found, OUR_CONNECTOR)


def build_connector_config(connector: str, *, options: Mapping[str, Any], address: Address | None) -> dict[str, Any]:
    """Return the configuration of one of vLLM's connectors; the engine's id is its address, for others to find."""
    named = {"engine_id": format_address(address)} if address else {}
    return named | _BOTH_ROLES | {"kv_connector": connector, "kv_connector_extra_config": dict(options)}


def build_files_config(directory: Path, *, version_file: Path) -> dict[str, Any]:
    """Return the configuration of our connector, which stores KV in a directory."""
    return _BOTH_ROLES | {
        "kv_connector": "FilesConnector",
        "kv_connector_module_path": "hpcrl.engines.vllm.kv_files_connector",
        "kv_connector_extra_config": {"directory": str(directory), "version_file": str(version_file)},
    }


def build_connector_env(address: Address | None) -> dict[str, str]:
    """Return the environment variables of a connector; without an address it is reached from this node only."""
    if address is None:
        return {"VLLM_HOST_IP": "127.0.0.1"}
    host, port = address
    return {
        "VLLM_HOST_IP": host,  # Mooncake uses this address
        "VLLM_NIXL_SIDE_CHANNEL_HOST": host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
        "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(port),
    }


def make_leave_params(name: str, *, num_held: int = 0) -> dict[str, Any]:
    """Return the parameters that store the KV of the prompt under a name, which is Mooncake's transfer id.

    Ours leaves out `num_held` tokens at the start, which the fetching engine has.
    """
    named = {"name": name, "transfer_id": name}
    return {"do_remote_decode": True, "do_remote_prefill": False, "num_held": num_held, **named}


def make_fetch_params(transfer: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the parameters that start with stored KV."""
    return {**(transfer or {}), "do_remote_prefill": True, "do_remote_decode": False}


def read_transfer_params(
    connector: str, answer: Mapping[str, Any], *, name: str, address: Address | None
) -> dict[str, Any] | None:
    """Return what the fetching engine needs, from the answer to `make_leave_params`; None: no KV was stored.

    Mooncake answers nothing, so its parameters are made from the name and address.
    """
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
