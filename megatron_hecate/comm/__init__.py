"""How replicas travel: transfer plans, the transports `p2p` and `nvlink`, and how much of a transfer hides."""
