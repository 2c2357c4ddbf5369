"""Engines that are larger than a node. Pure.

may_span_nodes          whether the engines of a role can be on several nodes
check_spanning_engines  what such engines need of the recipe and the site
"""

from collections.abc import Mapping

from hpcrl.config.recipe import Recipe, RoleName
from hpcrl.config.site import AUTO_CONNECTOR, OUR_CONNECTOR, Site
from hpcrl.errors import PlanError

ENGINE_ROLES: tuple[RoleName, ...] = ("prefill", "decode")


def may_span_nodes(role: RoleName, recipe: Recipe) -> bool:
    """Return whether the engines of a role can be on several nodes: vLLM's can, but not those of judges."""
    return role in ENGINE_ROLES and recipe.engine.backend == "vllm"


def check_spanning_engines(
    nodes_per_engine: Mapping[RoleName, int], recipe: Recipe, site: Site, *, partitions: Mapping[RoleName, str]
) -> list[str]:
    """Refuse settings that engines over several nodes do not support; return warnings."""
    spanning = [role for role, nodes in nodes_per_engine.items() if nodes > 1]
    if not spanning:
        return []
    role, found = spanning[0], []
    connector = site.choose_inference(partitions[role]).kv_connector
    has_handover = recipe.has_prefill and recipe.router.remote_prefill != "never"
    if has_handover and connector == OUR_CONNECTOR:
        raise PlanError(
            f"a {role} worker is on {nodes_per_engine[role]} nodes, whose KV cannot be handed over by "
            f'inference.kv_connector = "files" of site {site.name!r}: set resources.prefill.num_workers = 0, or '
            'kv_connector = "NixlConnector" in the site file'
        )
    if has_handover and connector == AUTO_CONNECTOR:
        found.append(
            f"a {role} worker is on {nodes_per_engine[role]} nodes: its KV is handed over only if the package nixl or "
            'mooncake is installed there and network.fabric is set; else set router.remote_prefill = "never"'
        )
    if not site.list_interfaces(partitions[role]):
        found.append(
            f"a {role} worker is on {nodes_per_engine[role]} nodes, and site {site.name} has no network.interface: "
            "its parts meet at the address of the host's name"
        )
    return found
