"""Parts of bench.router: the turns that are replayed, the fleet that serves them, the measured servers."""
