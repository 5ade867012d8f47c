"""Measurements on a user's own texts and machine: fidelity, comparisons, inspections, speed."""
