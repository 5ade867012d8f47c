"""Tables, plots and heat maps of measurements."""
