"""Parts of bench.rollout: environments that take time, and a campaign around a real env worker."""
