"""GPU kernels that choose entries and compute attention for one token of one request."""
