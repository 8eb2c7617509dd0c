"""Runtime of an iteration: its boundaries, load history, plans and prefetches."""
