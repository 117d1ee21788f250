"""Every architecture of the installed transformers, small: built, run, probed and judged."""
