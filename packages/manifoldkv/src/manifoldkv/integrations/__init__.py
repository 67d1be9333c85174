"""One host library each; import the one you need."""
