"""Parts of bench.router: the replayed turns and the fleet that serves them."""
