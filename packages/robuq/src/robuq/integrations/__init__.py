"""Plug-ins for host libraries; each module is imported by whoever uses that library."""
