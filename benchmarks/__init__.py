"""Benchmarks: one script an operation; ``python -m benchmarks`` runs them."""
