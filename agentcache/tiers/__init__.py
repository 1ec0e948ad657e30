"""Tiers: where data goes that has to leave the device and may be wanted back."""
