"""Copied into `.venv` and imported at start-up there: the first look for torchvision declares its missing operators."""

import sys


class BeforeTorchvision:
    """A finder that finds nothing."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "torchvision":
            sys.meta_path.remove(self)  # or the look for torchvision inside would come here again
            from icml26_shared.torchvision_ops import declare_missing_operators

            declare_missing_operators()


sys.meta_path.insert(0, BeforeTorchvision())  # type: ignore[arg-type]
