"""Attention written out by hand: from a softmax back to the products that made its scores."""
