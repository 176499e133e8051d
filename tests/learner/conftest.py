"""One thread per process: two intra-op threads beside another busy process are many times slower than one."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
