"""Measure fidelity, answers, kept entries and speed on the user's texts and machine."""
