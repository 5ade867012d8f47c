"""GPU kernels that choose entries and compute sparse attention for a single token."""
