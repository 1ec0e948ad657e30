"""Forward passes of our own, put together from common layers; transformers stays the oracle."""
