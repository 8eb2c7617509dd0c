"""Record and metrics of a run."""
