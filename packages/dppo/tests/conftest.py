"""Makes the helper modules of this folder importable, whichever way pytest imports test files."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch

torch.set_num_threads(1)  # the tensors are tiny, and several test processes may share the machine
