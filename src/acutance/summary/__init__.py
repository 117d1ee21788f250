"""The statistics that a probe records for every head: merging, comparing and saving them."""
