"""Scripts of this repository: measurements, training and generated docs."""
