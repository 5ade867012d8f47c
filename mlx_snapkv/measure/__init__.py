"""What users measure on their own texts and machine: fidelity, comparisons, inspections, speed."""
