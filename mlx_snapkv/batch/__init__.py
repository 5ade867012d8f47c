"""Batched generation, where each request has its own compressed cache."""
