"""The replicas on this rank: their buffers, their lifetimes, and how autograd runs through them."""
