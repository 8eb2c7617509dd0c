"""Checks whether FSSDP can be switched on for a job."""
