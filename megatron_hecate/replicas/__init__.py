"""Replicas of a rank: buffers, lifetimes, autograd and memory estimate."""
