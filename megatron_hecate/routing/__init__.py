"""Routing after the gate, by kernels: true loads to quotas, experts to physical experts.

| module | task |
|---|---|
| `tables` | static tables of the group and a placement, in the layout of the kernels |
| `quotas` | number of a source's tokens for each holder |
| `reroute` | routing map and probabilities over physical experts, with their gradient |

Nothing here synchronizes the host or branches on values of the device, so a CUDA graph can capture
all of it.
"""
