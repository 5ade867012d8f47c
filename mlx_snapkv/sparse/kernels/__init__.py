"""GPU kernels that choose and attend for one token of one request."""
