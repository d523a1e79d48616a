"""Parameters of models and contexts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ikpy.graph.activations import ActivationCollector
from ikpy.threads import physical_cores


@dataclass
class ModelParams:
    """How a model is loaded."""

    mla: int = 3
    use_mmap: bool = True
    use_mlock: bool = False
    check_tensors: bool = False
    kv_overrides: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class ContextParams:
    """How a context runs. 0 or None means: take it from the model; sizes are tokens, attn_max_batch is MiB."""

    n_ctx: int = 0
    n_batch: int = 2048
    n_ubatch: int = 512
    n_seq_max: int = 1
    n_threads: int = field(default_factory=physical_cores)
    n_threads_batch: int | None = None
    flash_attn: bool = True
    mla: int | None = None
    attn_max_batch: int = 256
    type_k: str = "f16"
    type_v: str = "f16"
    rope_freq_base: float = 0.0
    rope_freq_scale: float = 0.0
    rope_scaling: str | None = None
    yarn_orig_ctx: int = 0
    yarn_ext_factor: float = -1.0
    yarn_attn_factor: float = -1.0
    yarn_beta_fast: float = -1.0
    yarn_beta_slow: float = -1.0
    grouped_experts: bool = False
    smart_expert_reduction: tuple[int, float] = (-1, 0.0)
    embeddings: bool = False
    causal: bool = True
    collector: ActivationCollector | None = None  # receives statistics of the input of every matmul
