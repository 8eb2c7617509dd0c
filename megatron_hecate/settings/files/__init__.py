"""Readers of job settings: launch scripts, and YAML and JSON files of any framework."""
