"""All that touches Megatron's modules."""
