"""Tests of planning: no ranks, no Megatron."""
