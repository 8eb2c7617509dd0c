"""Commands that need no job."""
