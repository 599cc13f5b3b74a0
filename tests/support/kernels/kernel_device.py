"""Where tests run Triton's kernels: on the GPU where there is one, else in the interpreter, on tensors of the CPU."""

from __future__ import annotations

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
