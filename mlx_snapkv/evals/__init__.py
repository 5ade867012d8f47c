"""How well a compressed cache serves the model."""
