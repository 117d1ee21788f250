"""The statistics that a probe records for every head: merging them, comparing them, files."""
