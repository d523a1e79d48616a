"""Native records of a plan and the compiled plan itself."""

from __future__ import annotations

import numpy as np

MAX_SOURCES = 10
MAX_INT_PARAMS = 16
MAX_FLOAT_PARAMS = 12

# Mirrors ikpy::Tensor and ikpy::Op (ikpy/_native/include/ikpy/tensor.hpp).
TENSOR_DTYPE = np.dtype(
    [("data", "u8"), ("type", "i4"), ("flags", "i4"), ("ne", "i8", 4), ("nb", "i8", 4)], align=True
)
OP_DTYPE = np.dtype(
    [
        ("kind", "i4"),
        ("dst", "i4"),
        ("src", "i4", MAX_SOURCES),
        ("ip", "i4", MAX_INT_PARAMS),
        ("fp", "f4", MAX_FLOAT_PARAMS),
    ],
    align=True,
)
