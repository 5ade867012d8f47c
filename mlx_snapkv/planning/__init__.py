"""Plans requests before they run, and estimates their memory. Nothing here runs a model."""
