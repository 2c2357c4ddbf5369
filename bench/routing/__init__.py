"""Parts of bench.router: the replayed turns, the fleet that serves them, the measured servers."""
