"""The HTML report: one file that asks the network for nothing."""
