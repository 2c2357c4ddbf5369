"""Parts of bench.whole: its tasks, a measured campaign, and the times of its hand-overs."""
