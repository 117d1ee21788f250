"""Fitting a law to the loss: its derivative by the scale of every head, and steps along it."""
