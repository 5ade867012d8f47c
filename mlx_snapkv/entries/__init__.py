"""The KV entries and queries of one layer, and functions on them."""
