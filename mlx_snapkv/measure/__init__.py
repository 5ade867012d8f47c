"""Measure fidelity and speed, compare answers and inspect kept entries, on the user's texts and machine."""
