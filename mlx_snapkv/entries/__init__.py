"""What a layer holds, and pure functions on it."""
