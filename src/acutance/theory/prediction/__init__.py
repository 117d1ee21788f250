"""Predictions of every metric of a row, from a few parameters of its scores."""
