"""Log lines of the common tools on standard error, and those of a new context."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TextIO

from ikpy.cli.params import CommonParams

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ikpy.engine.adapter import LoraAdapter
    from ikpy.engine.context import Context
    from ikpy.engine.speculative import Speculation


def print_log(params: CommonParams, lines: Iterable[str]) -> None:
    """Print lines on standard error unless --log-disable was given."""
    if not params.log.disable:
        for line in lines:
            print(line.encode("utf-8", "replace").decode("utf-8"), file=sys.stderr)
        sys.stderr.flush()


def log_stream(params: CommonParams) -> TextIO:
    """Where tools that print their own log lines write them: standard error, or nowhere with --log-disable."""
    return io.StringIO() if params.log.disable else sys.stderr


class ProgressDots:
    """Prints a dot per percent on standard error, on one line of their own, unless --log-disable was given."""

    def __init__(self, params: CommonParams) -> None:
        self.params = params
        self.n_dots = 0
        self.in_line = False

    def __call__(self, share: float) -> None:
        """Share of the work that is done, 0 to 1."""
        n = int(100 * share)
        if n > self.n_dots and not self.params.log.disable:
            print("." * (n - self.n_dots), end="", file=sys.stderr, flush=True)
            self.in_line = True
        self.n_dots = max(n, self.n_dots)
        if n == 100:
            self.end_line()

    def end_line(self) -> None:
        """Goes to a new line if dots were printed."""
        if self.in_line:
            print(file=sys.stderr)
        self.in_line = False

    def log(self, line: str) -> None:
        """A log line between the dots."""
        self.end_line()
        print_log(self.params, [line])

    def __enter__(self) -> ProgressDots:
        return self

    def __exit__(self, *_: object) -> None:
        self.end_line()


def simd_banner() -> str:
    """Whether the fastest native core is in use."""
    from ikpy._native import tier

    state = "is defined" if tier == "avx512" else "is NOT defined"
    return f"======================================= HAVE_FANCY_SIMD {state}"


def adapter_line(adapter: LoraAdapter, scale: float) -> str:
    """What a LoRA adapter changes."""
    ranks = {a.shape[-2] for a, _ in adapter.pairs.values()}
    rank = f"rank {max(ranks)}" if len(ranks) == 1 else f"ranks {min(ranks)} to {max(ranks)}"
    return f"lora: {adapter.path}: {len(adapter.pairs)} weights adapted, {rank}, scale {scale:g}"


def control_vector_lines(files: Sequence[tuple[str, float]], rows: NDArray[np.float32]) -> list[str]:
    """The files of control vectors and the layers (rows of their sum, [n_layer, n_embd]) that are changed."""
    layers = [layer for layer, row in enumerate(rows) if row.any()]
    where = f"layers {', '.join(map(str, layers))}" if layers else "no layer: nothing is changed"
    return [f"control vector: {path}: scale {scale:g}" for path, scale in files] + [f"control vector: added to {where}"]


def context_log(context: Context) -> list[str]:
    """Log lines of a new context."""
    from ikpy.tools import run_logs

    params = context.params
    hparams = context.model.hparams
    mla = context.graph_params.mla
    has_latent = context.model.gguf.get(f"{hparams.arch}.attention.kv_lora_rank") is not None
    reduction, rope = params.smart_expert_reduction, context.graph_params.rope
    lines = run_logs.context_lines(
        {
            "n_ctx": context.n_ctx,
            "n_batch": context.n_batch,
            "n_ubatch": context.n_ubatch,
            "flash_attn": int(params.flash_attn),
            "mla_attn": mla if has_latent else None,
            "attn_max_b": params.attn_max_batch,
            "fused_moe": 1,
            "grouped er": int(params.grouped_experts),
            "fused_up_gate": 1,
            "fused_mmad": 1,
            "rope_cache": 1,
            "graph_reuse": 1,
            "k_cache_hadam": int(context.graph_params.k_hadamard),
            "v_cache_hadam": int(context.graph_params.v_hadamard),
            "ser": f"{reduction[0]}, {reduction[1]:g}",
            "freq_base": f"{rope.freq_base:.1f}",
            "freq_scale": f"{rope.freq_scale:g}",
        }
    )
    return lines + memory_log(context)


def memory_log(context: Context) -> list[str]:
    """Log lines of the memory of a context, and of its graph."""
    from ikpy.tools import run_logs

    lines: list[str] = []
    shared = context.model.arch.values_are_keys
    latent = sum(context.kv.nbytes(name) for name in ("kv", "kr", "ke"))
    k, v = (latent, 0) if latent else (context.kv.nbytes("k"), context.kv.nbytes("v"))
    lines += run_logs.window_cache_lines(context)
    devices = context.devices
    buffers = devices.cache_bytes() if devices else None
    lines += run_logs.kv_cache_lines(
        k, v, *run_logs.cache_type_names(context.graph_params), latent=latent > 0, shared=shared, buffers=buffers
    )
    lines += run_logs.compressed_cache_lines(context)
    lines += run_logs.index_cache_lines(context)
    lines += run_logs.state_lines(context.kv.recurrent, devices.state_bytes() if devices else {})
    if devices:
        for name, need in devices.needs.items():
            further = context.model.further_bytes(need.weights.values())
            lines += [run_logs.buffer_line(what, nbytes, name) for what, nbytes in further.items()]
            lines.append(run_logs.compute_buffer_line(need.compute_bytes, name))
            if unused := context.model.left_out(name, need.weights.values()):
                lines.append(run_logs.left_out_line(name, unused))
    lines.append(run_logs.compute_buffer_line(context.compute_bytes))
    return lines + run_logs.graph_lines(context.n_graph_nodes, context.n_graph_splits)


def plan_lines(context: Context, drafts: Speculation | None = None) -> list[str]:
    """Everything that a run would allocate, that of drafters included."""
    from ikpy.engine.memory import memory_report
    from ikpy.tools.run_logs import MIB

    tensors_and_cache = memory_report(context).total - context.compute_bytes
    required = f"Memory required for model tensors + cache: {tensors_and_cache / MIB:.0f} MiB"
    return [*memory_report(context, drafts).lines(), required]
