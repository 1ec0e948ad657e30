"""Recorded agent runs: reading them, and what a cache could save on them. Free of torch."""
