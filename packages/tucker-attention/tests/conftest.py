"""Shared by the tests of tucker-attention: run-time shape checks, hypothesis settings, threads."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent))  # tests share tucker_peers.py

import pytest
from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

# Shape annotations of these modules are checked at run time. Kernels are left out: Triton reads their source.
_CHECKED = ("attention", "heads", "rope", "decomposition", "cache")
install_import_hook([f"tucker_attention.{name}" for name in _CHECKED], "beartype.beartype")

settings.register_profile("house", deadline=None, max_examples=20, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("house")


@pytest.fixture(autouse=True)
def _one_thread_and_seed(one_thread):
    """In every test of this package."""
    import torch

    torch.manual_seed(0)
