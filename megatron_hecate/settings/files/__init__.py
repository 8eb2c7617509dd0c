"""Settings of jobs, as files and scripts have them."""
