"""Faults: ranks that stall or die, restarts in the process, and the threads that notice."""
