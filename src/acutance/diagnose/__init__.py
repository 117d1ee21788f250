"""What a head's numbers mean: one table of thresholds, one set of rules, and their sentences."""
