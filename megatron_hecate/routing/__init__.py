"""After the gate: from true loads to quotas, and from experts to physical experts, by kernels over static tables.

| module | what |
|---|---|
| `tables` | the group and a placement, as the kernels read them |
| `quotas` | how many of a source's tokens go to each holder |
| `reroute` | the routing map and probabilities over physical experts, with their gradient |

The host waits for nothing here, and decides nothing by values on the device: a CUDA graph may hold all of it.
"""
