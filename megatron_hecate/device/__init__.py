"""The kernels of this project, as Python sees them: compiled at first use, loaded, launched."""
