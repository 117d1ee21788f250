"""Hand-written attention: trace the input of a softmax back to products of queries and keys."""
