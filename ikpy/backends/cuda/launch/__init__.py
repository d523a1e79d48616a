"""Lowering of graph ops to kernel launches: which kernels run an op, with which geometry and arguments.

``lower`` needs no device: addresses come from the caller. Two values stand for memory the caller provides besides
the graph's own: RUNTIME, int32 [4] with n_kv first, which kernels read so that a captured launch can be replayed, and
WORK, scratch memory of ``work_bytes`` (the maximum over the ops of a plan; ops run one after the other).
"""

# The modules that are imported for their lowerings alone come by their names.
from ikpy.backends.cuda.launch import elementwise, experts, positions
from ikpy.backends.cuda.launch.attention import flash_shared_bytes
from ikpy.backends.cuda.launch.base import (
    ACT_BF16,
    FLOAT_WEIGHTS,
    RUNTIME,
    WORK,
    Launch,
    Target,
    act_row_bytes,
    pointer,
)
from ikpy.backends.cuda.launch.files import kernel_file
from ikpy.backends.cuda.launch.norms import joined
from ikpy.backends.cuda.launch.products_bf16 import BF16_TOKENS
from ikpy.backends.cuda.launch.products_bf16 import wanted as wants_bf16
from ikpy.backends.cuda.launch.support import lower, supports, weight_types, work_bytes

__all__ = [
    "ACT_BF16",
    "BF16_TOKENS",
    "FLOAT_WEIGHTS",
    "RUNTIME",
    "WORK",
    "Launch",
    "Target",
    "act_row_bytes",
    "elementwise",
    "experts",
    "flash_shared_bytes",
    "joined",
    "kernel_file",
    "lower",
    "pointer",
    "positions",
    "supports",
    "wants_bf16",
    "weight_types",
    "work_bytes",
]
