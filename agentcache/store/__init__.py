"""The store: finished turns in a database, written off the engine's thread, read for replay.

`base` is what a session knows of it, free of SQLAlchemy; the rest is imported only where a store is
used.
"""
