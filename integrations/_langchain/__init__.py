"""What the chat model and the middleware are made of."""
