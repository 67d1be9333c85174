"""Training-free KV-cache compression by distance to the key centroid."""

__version__ = "0.1.0"
