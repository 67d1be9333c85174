"""What every package of this workspace shares: command-line manners, claims, benches, checkpoints, plots, models, data.

Importing it loads nothing; take what is needed from the modules, e.g. ``from icml26_shared.cli import App``.
"""

__version__ = "0.1.0"
__all__ = ["__version__"]
