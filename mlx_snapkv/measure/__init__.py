"""Measure fidelity, answers, kept entries and speed on a user's own texts and machine."""
