"""Plug-ins, one file a host library; import the one you need."""
