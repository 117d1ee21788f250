"""Exact means over softmax rows of n keys whose scores are independent draws from one law."""
