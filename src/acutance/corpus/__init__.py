"""Corpus: texts, models and runs over them, with one process or many."""
