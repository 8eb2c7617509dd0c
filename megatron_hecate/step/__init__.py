"""One step of training: layers, their replicas' states, prefetching, and where iterations begin."""
