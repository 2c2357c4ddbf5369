"""Parts of bench.rollout: the environments and how long they take, and a campaign around a real env host."""
