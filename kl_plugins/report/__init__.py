"""Figures from runs: reads the rows of ``metrics.jsonl``, imports no torch."""
