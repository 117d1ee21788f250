"""Exact means over softmax rows of n keys with independent, identically distributed scores."""
