"""Compilation, loading and launch of this project's kernels."""
