"""Lets torchvision's Python part, and so timm and transformers' image code, be imported beside a torch that its
compiled operators were not built for (the CPU build of torch beside an index's CUDA build of torchvision).

There the import stops at ``operator torchvision::nms does not exist``, since torchvision describes operators that its
library, which did not load, should have declared. Declaring their schemas is enough: models without detection heads
never call them, and a call says that the operator has no implementation. Where the library loads, nothing is declared.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

OPERATORS = ("nms", "qnms")
SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_kept: list[Any] = []  # a torch.library.Library takes its declarations back when it is collected


def declare_missing_operators() -> bool:
    """Declare torchvision's operators if it is installed and its own library does not load; ``True`` if it was so.

    To be called before ``torchvision`` is imported; a second call does nothing. The workspace's own environment calls
    it when somebody first looks for torchvision (``tools/torchvision_hook.py``).
    """
    spec = importlib.util.find_spec("torchvision") if "torchvision" not in sys.modules else None
    if spec is None or spec.origin is None or _kept:
        return False
    import torch

    try:
        for library in sorted(Path(spec.origin).parent.glob("_C*.so")):
            torch.ops.load_library(str(library))
    except OSError:
        pass  # built for another torch: torchvision itself goes on without it
    if hasattr(torch.ops.torchvision, OPERATORS[0]):
        return False
    declared = torch.library.Library("torchvision", "DEF")
    for name in OPERATORS:
        declared.define(name + SCHEMA)
    _kept.append(declared)
    return True
