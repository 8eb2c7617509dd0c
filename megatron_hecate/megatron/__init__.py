"""Adapters to Megatron's modules."""
