"""Which checkpoints to keep, which entries leave first, and what each is worth."""
