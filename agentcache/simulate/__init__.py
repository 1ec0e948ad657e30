"""Traces through the cache without a model: what a policy would have reused, and why not more."""
