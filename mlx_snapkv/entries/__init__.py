"""One layer's KV entries and queries, and the functions that work on them."""
