"""Counts, words and figures of a run."""
