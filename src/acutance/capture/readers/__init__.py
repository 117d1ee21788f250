"""Readers: each turns the arguments of one kind of attention call into an AttentionCall."""
