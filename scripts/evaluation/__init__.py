"""Questions with known answers for the full cache and for policies: the commands of `scripts/evaluate.py`."""
