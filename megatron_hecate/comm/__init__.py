"""Moving replicas: transfer plans, the transports `p2p` and `nvlink`, and measured overlap."""
