"""Adapters to agent frameworks, one module and one optional extra each."""
