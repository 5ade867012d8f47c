"""Training the embedded models: `scripts/train_demo_model.py` is the entry point."""
