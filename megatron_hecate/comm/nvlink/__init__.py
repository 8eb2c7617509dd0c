"""The transport `nvlink`: kernels over memory that peers can read, and stripes between NVLink domains."""
