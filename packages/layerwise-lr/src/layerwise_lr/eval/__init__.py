"""The small language model that claims, demo and bench train."""
