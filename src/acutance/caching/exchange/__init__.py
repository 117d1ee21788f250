"""Cache plans of other tools: exports and imports, and a plan as a record for the report."""
