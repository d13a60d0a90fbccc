"""GPU kernels with their references. It knows arrays, not drafters, and imports jax and nothing of this project."""
