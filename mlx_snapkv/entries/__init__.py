"""The KV entries and queries of one layer, and pure functions of them."""
