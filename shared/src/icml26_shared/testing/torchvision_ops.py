"""Let torchvision import beside a build of torch that its compiled operators do not fit.

timm and diffusers import torchvision, whose wheel on the package index belongs to torch's default build. Beside another
build (CPU, ROCm) its operators do not load, and its import fails on ``torchvision::nms``, whose shape rule it
registers. Declaring that operator's schema is enough for everything that does not detect objects.
"""

from __future__ import annotations

import importlib
import importlib.util

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_OPERATORS = ("nms", "qnms")


def declare_torchvision_ops() -> bool:
    """Declare the schemas that torchvision's import needs, where its own operators are not there.

    Call it before anything imports torchvision.

    Returns:
        Whether torchvision is installed and imports now.
    """
    if importlib.util.find_spec("torchvision") is None:
        return False
    import torch

    try:
        importlib.import_module("torchvision")
    except RuntimeError:  # operator torchvision::nms does not exist
        _forget()
        for name in _OPERATORS:
            if not hasattr(torch.ops.torchvision, name):
                torch.library.define(f"torchvision::{name}", _SCHEMA)
        importlib.import_module("torchvision")
    return True


def _forget() -> None:
    """Drop what a failed import left behind."""
    import sys

    for name in [name for name in sys.modules if name == "torchvision" or name.startswith("torchvision.")]:
        del sys.modules[name]
