"""Fitting a law: passes over windows of text, sums of rows, and the factors that meet a target."""
