"""Routes that are known before the forward: replayed by RL, or announced by a loop."""
