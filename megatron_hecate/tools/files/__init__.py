"""Settings of a job as its files state them: YAML, JSON, and scripts of a shell."""
