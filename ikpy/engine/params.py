"""Parameters of models and contexts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from ikpy.engine.cells import MAX_SEQUENCES
from ikpy.errors import UsageError
from ikpy.graph.activations import ActivationCollector
from ikpy.graph.placement import DeviceParams, PlacementParams
from ikpy.machine.threads import physical_cores
from ikpy.models.hparams import ROPE_SCALING_TYPES

if TYPE_CHECKING:
    from ikpy.engine.adapter import LoraAdapter
    from ikpy.engine.media import MediaStore

PLAIN_CACHE_TYPES = ("f32", "f16", "bf16")
THREAD_SETS, DRAFT_THREAD_SETS = (0, 1), (2, 3)
"""Numbers of core.set_thread_set for single tokens and for more, of a model and of its drafter."""


@dataclass
class ModelParams:
    """How a model is loaded."""

    mla: int = 3
    use_mmap: bool = True
    huge_pages: bool = False  # without use_mmap: reserved huge pages where enough are free
    read_ahead: bool = True  # False: pages of the mapping are read one by one by the threads that use them
    fill: bool = True  # bring the mapping into memory in the background, if there is room for all of it
    defer_experts: bool = False  # but for experts, which are read when they are needed
    prefetch_experts: bool | None = None  # read chosen experts of the mapping ahead; None: if it exceeds the memory
    prefetch_threads: int = 4
    use_mlock: bool = False
    check_tensors: bool = False
    kv_overrides: Mapping[str, Any] = field(default_factory=dict)
    repack: bool = False  # rearrange weights into their row-interleaved types after loading
    header_only: bool = False  # read no tensor data: such a model can only be planned
    placement: PlacementParams = field(default_factory=PlacementParams)
    devices: DeviceParams = field(default_factory=DeviceParams)


@dataclass
class ContextParams:
    """How a context runs. 0 or None means: take it from the model; sizes are tokens, attn_max_batch is MiB."""

    n_ctx: int = 0
    n_batch: int = 2048
    n_ubatch: int = 512
    n_seq_max: int = 1
    n_threads: int = field(default_factory=physical_cores)
    n_threads_batch: int | None = None
    thread_sets: tuple[int, int] = THREAD_SETS
    flash_attn: bool = True
    mla: int | None = None
    attn_max_batch: int = 256
    type_k: str = "f16"
    type_v: str = "f16"
    type_k_first: tuple[str, int] | None = None  # another type for the first (last) n layers
    type_k_last: tuple[str, int] | None = None
    type_v_first: tuple[str, int] | None = None
    type_v_last: tuple[str, int] | None = None
    type_indexer: str = "f16"
    sparse_top_k: int = -1  # cells that indexers choose for a token, 0 = all, -1 = what the file says
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
    token_states: bool = False  # keep the hidden states of all tokens, for prediction heads
    n_kept_states: int = 0  # tokens of a sequence's end that recurrent layers can take back, for drafts
    causal: bool = True
    k_hadamard: bool = False  # transform keys (values) before a quantized cache stores them
    v_hadamard: bool = False
    swa_full: bool = False  # window layers keep all n_ctx cells
    adapters: Sequence[LoraAdapter] = ()
    collector: ActivationCollector | None = None  # receives statistics of the input of every matmul
    media: MediaStore | None = None  # rows that ids behind the vocabulary stand for

    @property
    def cell_multiple(self) -> int:
        """The number of cells is rounded up to a multiple of this."""
        return 256 if self.flash_attn else 32

    def check(self) -> None:
        """Raises UsageError for values that are wrong for every model."""
        if self.n_batch <= 0 or self.n_ubatch < 0:
            raise UsageError("batch and micro-batch size must be above 0 (-b, -ub)")
        if self.n_ctx < 0:
            raise UsageError(f"a context of {self.n_ctx} tokens: 0 (what the model has) or more are possible (-c)")
        n_threads = min(self.n_threads, self.n_threads_batch or self.n_threads)
        if n_threads < 1:
            raise UsageError(f"{n_threads} threads: at least 1 is needed (-t, -tb)")
        if self.n_kept_states < 0:
            raise UsageError(f"{self.n_kept_states} kept states: 0 or more are possible")
        if not 1 <= self.n_seq_max <= MAX_SEQUENCES:
            raise UsageError(f"{self.n_seq_max} parallel sequences: 1 to {MAX_SEQUENCES} are possible")
        if self.sparse_top_k < -1:
            raise UsageError(f"-dsatk {self.sparse_top_k}: -1 (what the file says), 0 (all cells) or more are possible")
        if self.rope_scaling not in (None, *ROPE_SCALING_TYPES):
            raise UsageError(f"--rope-scaling {self.rope_scaling}: possible are {', '.join(ROPE_SCALING_TYPES)}")
        types_v = [self.type_v, *(edge[0] for edge in (self.type_v_first, self.type_v_last) if edge and edge[1] > 0)]
        if not self.flash_attn and any(name.lower() not in PLAIN_CACHE_TYPES for name in types_v):
            raise UsageError("V cache quantization requires flash_attn")


def fields_of(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that are fields of a dataclass."""
    names = {item.name for item in fields(kind)}
    return {name: value for name, value in values.items() if name in names}
