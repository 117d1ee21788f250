"""Capture: see every call of attention that a PyTorch model makes, whatever computes it."""
