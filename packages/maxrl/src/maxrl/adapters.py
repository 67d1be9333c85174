"""Short name of :mod:`maxrl.integrations.adapters`."""

from maxrl.integrations.adapters import prime_rl, skyrl

__all__ = ["prime_rl", "skyrl"]
