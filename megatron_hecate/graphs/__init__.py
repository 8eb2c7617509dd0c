"""Box: iterations that one CUDA graph holds."""
