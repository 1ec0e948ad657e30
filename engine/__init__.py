"""Tokens in, tokens out: the engine that runs a model over the cache's pages and states."""
