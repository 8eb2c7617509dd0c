"""What touches Megatron: the table of assumptions, the dispatcher and the experts."""
