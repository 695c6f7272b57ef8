"""Run by Python itself where this folder is on PYTHONPATH: gives every process the stand-in for CUDA.

scripts/check.sh standin       builds it and runs all tests that need a GPU

PYTHONPATH=tests/standin GEMINI_STANDIN_DIR=build/cmake-.../standin gemini bench gpu --quick
"""

from __future__ import annotations

import cuda_standin
import nccl_standin

cuda_standin.install()
nccl_standin.install()
