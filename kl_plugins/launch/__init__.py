"""Runs a recipe on this machine: lookup, the framework's native command, supervision, diagnosis. Imports no torch."""
