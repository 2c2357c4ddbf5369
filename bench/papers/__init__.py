"""Published figures beside those of the simulator and the cost model: `python -m bench.papers`."""
