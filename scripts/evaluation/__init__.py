"""Questions with known answers, put to the full cache and to policies: the commands of `scripts/evaluate.py`."""
