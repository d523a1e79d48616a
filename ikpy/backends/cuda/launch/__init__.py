"""Lowering of graph ops to kernel launches: which kernels run an op, with which geometry and arguments.

``lower`` needs no device: addresses come from the caller. Two values stand for memory the caller provides besides
the graph's own: RUNTIME, int32 [4] with n_kv first, which kernels read so that a captured launch can be replayed, and
WORK, scratch memory of ``work_bytes`` (the maximum over the ops of a plan; ops run one after the other).
"""

# The modules that are imported for their lowerings alone come by their names.
from ikpy.backends.cuda.launch import elementwise, experts, hyper_connections, indexer, positions, recurrent
from ikpy.backends.cuda.launch.attention import flash_shared_bytes
from ikpy.backends.cuda.launch.base import (
    ACT_BF16,
    ACT_TILES,
    FLOAT_WEIGHTS,
    RUNTIME,
    WORK,
    Address,
    Large,
    Launch,
    Target,
    act_row_bytes,
    pointer,
    tiled_bytes,
)
from ikpy.backends.cuda.launch.files import family_types, kernel_file
from ikpy.backends.cuda.launch.merging import merged
from ikpy.backends.cuda.launch.norms import joined
from ikpy.backends.cuda.launch.products_bf16 import BF16_TOKENS
from ikpy.backends.cuda.launch.products_bf16 import activation_format as large_format
from ikpy.backends.cuda.launch.support import lower, supports, weight_types, work_bytes

__all__ = [
    "ACT_BF16",
    "ACT_TILES",
    "BF16_TOKENS",
    "FLOAT_WEIGHTS",
    "RUNTIME",
    "WORK",
    "Address",
    "Large",
    "Launch",
    "Target",
    "act_row_bytes",
    "elementwise",
    "experts",
    "family_types",
    "flash_shared_bytes",
    "hyper_connections",
    "indexer",
    "joined",
    "kernel_file",
    "large_format",
    "lower",
    "merged",
    "pointer",
    "positions",
    "recurrent",
    "supports",
    "tiled_bytes",
    "weight_types",
    "work_bytes",
]
