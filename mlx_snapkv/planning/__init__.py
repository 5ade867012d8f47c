"""How much memory a prompt will take, counted from the model itself before its weights are loaded."""
