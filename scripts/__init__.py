"""Scripts for measurements, training and generated docs."""
