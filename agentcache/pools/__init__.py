"""Pools: who holds which page, and the tensors behind the pages."""
