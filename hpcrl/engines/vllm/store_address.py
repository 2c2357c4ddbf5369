"""The addresses of torch's stores in vLLM's processes: torch listens on all interfaces of a node by itself.

bind_stores  make each store listen only at the address that the others connect to; for hpcrl.engines.vllm.weight_plugin
open_store   open or connect a store
"""

import errno
import importlib
import socket
from typing import Any

from torch._C._distributed_c10d import TCPStore
from vllm.distributed import utils

MODULES = (importlib.import_module("torch.distributed.rendezvous"), utils)  # torch hides the first by a function
"""The modules in which vLLM's processes open stores."""


def bind_stores() -> None:
    """Replace the class of stores where torch and vLLM open them."""
    for module in MODULES:
        setattr(module, "TCPStore", open_store)  # noqa: B010 - mypy knows it as a class


def open_store(host_name: str, port: int, *args: Any, **options: Any) -> TCPStore:
    """Open a store as torch does, but at one address; or connect to one."""
    if not options.get("is_master") or options.get("master_listen_fd") is not None:
        return TCPStore(host_name, port, *args, **options)
    family = socket.AF_INET6 if ":" in host_name else socket.AF_INET
    try:
        listener = socket.create_server((host_name, port), family=family)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return TCPStore(host_name, port, *args, **options)  # one of this process, or the error that vLLM expects
    port = int(listener.getsockname()[1])
    options["master_listen_fd"] = listener.detach()  # the store closes it
    return TCPStore(host_name, port, *args, **options)
