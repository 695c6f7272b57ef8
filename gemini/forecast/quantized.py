"""What an operator of bitsandbytes computes and holds within one call on the CPU, where nobody sees it."""

from __future__ import annotations

import math
from typing import Any

_PRODUCT = "bitsandbytes::gemm_4bit"
_SCALE_BYTES = 4


def product_flops(func: Any, args: tuple[Any, ...]) -> int:
    """Return the multiplications and additions of a product of activations ``[..., K]`` and a packed weight
    ``[N, K]``; 0 for another operator."""
    return 2 * int(args[0].numel()) * int(args[2][0]) if func.name() == _PRODUCT else 0


def workspace_bytes(func: Any, args: tuple[Any, ...]) -> int:
    """Return what an operator holds until it has its result: the weight and its scales, unpacked."""
    if func.name() != _PRODUCT:
        return 0
    x, shape, block_size = args[0], args[2], args[4]
    numel = math.prod(shape)
    return int(numel * x.element_size() + -(-numel // block_size) * _SCALE_BYTES)
