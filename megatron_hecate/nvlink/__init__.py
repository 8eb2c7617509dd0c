"""Transport `nvlink`: kernels that copy and sum through peers' memory inside an NVLink domain."""
