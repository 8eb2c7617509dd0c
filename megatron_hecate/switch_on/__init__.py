"""Ways to switch FSSDP on, the checks before, and the conversion of a model."""
