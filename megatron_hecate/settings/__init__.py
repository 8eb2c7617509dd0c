"""Whether FSSDP may be switched on for a job."""
