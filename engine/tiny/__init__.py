"""How `tiny-agent` is made: the dialogues it learns, its tokenizer, its training and its test."""
