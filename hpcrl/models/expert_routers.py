"""The routers of a model of transformers, which send each token to a few experts of a layer.

    find_routers     the routers of a model, in the order of its layers

A router returns its logits, the weights of the experts that it chose, and their numbers.
"""

import torch


def find_routers(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the router of each layer that has experts."""
    gates = [each.gate for each in module.modules() if hasattr(each, "experts") and hasattr(each, "gate")]
    return [gate for gate in gates if isinstance(gate, torch.nn.Module) and hasattr(gate, "top_k")]
