"""Sessions: who is alive, and which checkpoints a live trajectory stands on."""
