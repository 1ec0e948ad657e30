"""Mixers whose forward pass we replace on a loaded model."""
