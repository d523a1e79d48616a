"""The tests of a benchmark: every combination of the values of its parameters."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any


@dataclass
class BenchParams:
    """Sweep lists and single values of a benchmark.

    Every field named in LIST_FIELDS is a list; all combinations are measured. `threads` holds pairs (generation,
    batch), `prompts_generated` and `generated_at_depth` pairs (prompt tokens, generated tokens).
    """

    models: list[str]
    threads: list[tuple[int, int]]
    n_prompt: list[int] = field(default_factory=lambda: [512])
    n_gen: list[int] = field(default_factory=lambda: [128])
    prompts_generated: list[tuple[int, int]] = field(default_factory=list)
    generated_at_depth: list[tuple[int, int]] = field(default_factory=list)
    n_depth: list[int] = field(default_factory=lambda: [0])
    n_batch: list[int] = field(default_factory=lambda: [2048])
    n_ubatch: list[int] = field(default_factory=lambda: [512])
    type_k: list[str] = field(default_factory=lambda: ["f16"])
    type_v: list[str] = field(default_factory=lambda: ["f16"])
    n_gpu_layers: list[int] = field(default_factory=lambda: [999])
    split_mode: list[str] = field(default_factory=lambda: ["layer"])
    main_gpu: list[int] = field(default_factory=lambda: [0])
    no_kv_offload: list[bool] = field(default_factory=lambda: [False])
    flash_attn: list[bool] = field(default_factory=lambda: [True])
    mla_attn: list[int] = field(default_factory=lambda: [3])
    attn_max_batch: list[int] = field(default_factory=lambda: [0])
    ser: list[tuple[int, float]] = field(default_factory=lambda: [(-1, 0.0)])
    reuse: list[bool] = field(default_factory=lambda: [True])
    tensor_split: list[tuple[float, ...]] = field(default_factory=lambda: [(0.0,)])
    use_mmap: list[bool] = field(default_factory=lambda: [True])
    repack: list[bool] = field(default_factory=lambda: [False])
    embeddings: list[bool] = field(default_factory=lambda: [False])
    repetitions: int = 5
    warmup: bool = True
    delay: int = 0
    progress: bool = False
    verbose: bool = False
    output: str = "md"
    output_err: str = "none"
    mqkv: bool = False
    muge: bool = False
    lazy_mode: str = "auto"
    defer_experts: bool = False
    fused_moe: bool = True
    grouped_er: bool = False
    no_fused_up_gate: bool = False
    use_thp: bool = False
    numa: str | None = None
    no_ooae: bool = False
    rcache: bool = False
    sas: bool = False
    max_gpu: int = 0
    n_cpu_moe: int = 0
    devices: tuple[str, ...] | None = None
    hosts: tuple[str, ...] = ()
    no_op_offload: bool = False
    cuda_params: str = ""
    override_tensor: str = ""
    print_overrides: bool = False
    dry_run: bool = False


# Outer loop first.
SWEEP_ORDER = (
    "n_gpu_layers",
    "split_mode",
    "main_gpu",
    "tensor_split",
    "use_mmap",
    "repack",
    "embeddings",
    "n_batch",
    "n_ubatch",
    "type_k",
    "type_v",
    "no_kv_offload",
    "flash_attn",
    "mla_attn",
    "attn_max_batch",
    "reuse",
    "ser",
    "threads",
)
LOAD_TIME = (
    "n_gpu_layers",
    "split_mode",
    "main_gpu",
    "tensor_split",
    "no_kv_offload",
    "use_mmap",
    "repack",
    "mla_attn",
)


@dataclass(frozen=True)
class BenchTest:
    """One measurement: values of all sweep fields and the token counts.

    ``depth``: tokens that are in the cache already when the time begins.
    """

    model: str
    values: dict[str, Any]
    n_prompt: int
    n_gen: int
    at_depth: bool = False
    depth: int = 0

    @property
    def label(self) -> str:
        """`pp512`, `tg128`, `pp512+tg128` or `tg128@pp512`, with ` @ d4096` behind a depth."""
        behind = f" @ d{self.depth}" if self.depth else ""
        if self.at_depth:
            return f"tg{self.n_gen}@pp{self.n_prompt}{behind}"
        parts = [f"pp{self.n_prompt}"] if self.n_prompt else []
        return "+".join(parts + ([f"tg{self.n_gen}"] if self.n_gen else [])) + behind

    @property
    def counted_tokens(self) -> int:
        """Tokens whose time is measured."""
        return self.n_gen if self.at_depth else self.n_prompt + self.n_gen

    @property
    def n_threads(self) -> int:
        """Generation threads if anything is generated, else batch threads."""
        generation, batch = self.values["threads"]
        return generation if self.n_gen else batch

    @property
    def load_key(self) -> tuple[Any, ...]:
        """Two tests with equal keys can share a loaded model."""
        return (self.model, *(self.values[name] for name in LOAD_TIME))


def bench_tests(params: BenchParams) -> Iterator[BenchTest]:
    """All measurements in the order in which they run."""
    lists = [getattr(params, name) for name in SWEEP_ORDER]
    for model in params.models:
        for combination in itertools.product(*lists):
            values = dict(zip(SWEEP_ORDER, combination, strict=True))
            for depth in params.n_depth:
                make = partial(BenchTest, model, values, depth=depth)
                yield from (make(n, 0) for n in params.n_prompt if n)
                yield from (make(0, n) for n in params.n_gen if n)
                yield from (make(pp, tg) for pp, tg in params.prompts_generated)
                yield from (make(pp, tg, at_depth=True) for pp, tg in params.generated_at_depth)
