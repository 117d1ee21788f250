"""Attention written with torch operations: trace a softmax back to the products of its scores."""
