"""The load of the event loop of an env worker: all model calls of its episodes are answered in one process. Pure.

    estimate_call_rate   the calls per second that one loop bears
    CALL_CPU_MS, TOKEN_CPU_US  the measured cost of a call
    PLANNED_LOOP_SHARE   how much of a core the planner gives to calls
    BUSY_LOOP_SHARE      from where on calls wait for the loop

The costs are those of `python -m bench.proxy`, which also shows how many calls one and two processes bear.
"""

CALL_CPU_MS = 0.8
"""The CPU of a call of an agent program in a short conversation."""
TOKEN_CPU_US = 0.06
"""The CPU that each token of the conversation adds, as a client sends all of it with each call."""
PLANNED_LOOP_SHARE = 0.5
"""The share of a core that calls may use in a plan; routing, requests to engines and records need the rest."""
BUSY_LOOP_SHARE = 0.8
"""The share of a core that a loop uses when it is the limit."""


def estimate_call_rate(*, num_context: float) -> float:
    """Return the calls per second that one env worker bears, in conversations of `num_context` tokens on average."""
    return PLANNED_LOOP_SHARE / (CALL_CPU_MS * 1e-3 + num_context * TOKEN_CPU_US * 1e-6)
