"""The transport `nvlink`: kernels over peers' memory, and stripes between NVLink domains."""
