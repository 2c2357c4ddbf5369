"""The campaigns that bench.whole and its peers measure: their tasks, one that runs, and the times of its hand-overs."""
