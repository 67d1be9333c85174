"""torchvision beside a torch that its library was not built for: imitated by a package whose library is no library."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("torch")

PACKAGE = """
import torch
@torch.library.register_fake("torchvision::nms")
def fake(dets, scores, iou_threshold):
    return dets.new_empty((3,), dtype=torch.int64)
"""
# The environment's own hook is taken off, so that the code decides.
START = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "BeforeTorchvision"]
"""


def run(code, *folders):
    path = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", START + textwrap.dedent(code)]
    return subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=240)


@pytest.fixture
def broken(tmp_path):
    folder = tmp_path / "torchvision"
    folder.mkdir()
    (folder / "__init__.py").write_text(PACKAGE)
    (folder / "_C.so").write_bytes(b"no library")
    return tmp_path


def test_without_help_the_import_fails(broken):
    result = run("import torchvision", broken)
    assert result.returncode != 0
    assert "torchvision::nms does not exist" in result.stderr


def test_the_hook_declares_before_the_import(broken):
    """What the workspace's environment imports at start-up (tools/torchvision_hook.py)."""
    hook = Path(__file__).parents[2] / "tools" / "torchvision_hook.py"
    if not hook.is_file():
        pytest.skip("needs the workspace's tools beside the package")
    code = """
        import torchvision_hook
        assert "torch" not in sys.modules, "torch loads only when torchvision is looked for"
        import torchvision, torch
        assert not any(type(finder).__name__ == "BeforeTorchvision" for finder in sys.meta_path)
        meta = torch.empty((5, 4), device="meta")
        assert torch.ops.torchvision.nms(meta, meta[:, 0], 0.5).shape == (3,)
        try:
            torch.ops.torchvision.nms(torch.zeros(5, 4), torch.zeros(5), 0.5)
        except NotImplementedError as error:
            print("refused", "torchvision::nms" in str(error))
        from icml26_shared.torchvision_ops import declare_missing_operators
        print(declare_missing_operators())
    """
    result = run(code, broken, hook.parent)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["refused", "True", "False"]


def test_nothing_is_declared_without_torchvision():
    code = """
        import importlib.util
        real = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *more: None if name == "torchvision" else real(name, *more)
        from icml26_shared.torchvision_ops import declare_missing_operators
        print(declare_missing_operators(), "torch" in sys.modules)
    """
    result = run(code)
    assert result.stdout.split() == ["False", "False"], result.stderr
