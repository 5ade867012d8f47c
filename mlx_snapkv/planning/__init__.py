"""How much memory a prompt will take, counted from a model's shapes before its weights are loaded."""
