"""What a run records and logs."""
