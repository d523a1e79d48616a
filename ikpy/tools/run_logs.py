"""Log lines of contexts and runs, in the wording that scripts and people know: no line ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ikpy.models.batch import GraphParams
from ikpy.quants import registry

if TYPE_CHECKING:
    from ikpy.engine.context import Context
    from ikpy.engine.recurrent import RecurrentStates

MIB = 1 << 20
CONTEXT = "llama_init_from_model: "


def context_lines(values: Mapping[str, Any]) -> list[str]:
    """Parameters of a context, width 13.

    Args:
        values: name to value in print order: numbers, texts, or None for a line to leave out.
    """
    return [f"{CONTEXT}{name:<13} = {text}" for name, text in values.items() if text is not None]


def cache_type_names(params: GraphParams) -> tuple[str, str]:
    """Types of the K and V caches, those of all layers with a slash between them where they differ."""

    def names(types: Sequence[int]) -> str:
        return "/".join(registry.by_id(type_id).name for type_id in dict.fromkeys(types))

    return names(params.types_k), names(params.types_v)


def kv_cache_lines(
    k_bytes: int,
    v_bytes: int,
    type_k: str,
    type_v: str,
    *,
    latent: bool,
    shared: bool = False,
    buffers: Mapping[str, int] | None = None,
) -> list[str]:
    """Size of the KV cache. `latent`: the K part holds c^KV and the V part its transposed copy, if any. shared: keys
    are the values.

    buffers: bytes of the cache in host memory ("CPU") and on each device; all in host memory if absent.
    """
    total = f"KV self size  = {(k_bytes + v_bytes) / MIB:7.2f} MiB, "
    if shared:
        parts = f"K = V ({type_k}): {k_bytes / MIB:7.2f} MiB"
    elif not latent:
        parts = f"K ({type_k}): {k_bytes / MIB:7.2f} MiB, V ({type_v}): {v_bytes / MIB:7.2f} MiB"
    elif v_bytes:
        parts = f"c^KV ({type_k}): {k_bytes / MIB:7.2f} MiB, kv^T ({type_v}): {v_bytes / MIB:7.2f} MiB"
    else:
        parts = f"c^KV ({type_k}): {k_bytes / MIB:7.2f} MiB, kv^T: not used"
    sizes = buffers or {"CPU": k_bytes + v_bytes}
    lines = [f"llama_kv_cache_init: {name:>10} KV buffer size = {size / MIB:8.2f} MiB" for name, size in sizes.items()]
    return [*lines, CONTEXT + total + parts]


def window_cache_lines(context: Context) -> list[str]:
    """Cells of every kind of cache, if some layers keep a window only."""
    kv = context.kv
    lines = []
    for (kind, size), cells in kv.windows.items():
        layers = {layer for (layer, _), window in kv.window_of.items() if window == (kind, size)}
        lines.append(
            f"llama_kv_cache_init: {len(layers)} layers with a {kind} window of {size} keep {cells.n_cells} cells "
            f"instead of {kv.n_ctx} (--swa-full keeps all)"
        )
    return lines


def compressed_cache_lines(context: Context) -> list[str]:
    """Cells of compressed stretches, and the size of what the next ones are made of, if there are any."""
    kv = context.kv
    lines = []
    for every, cells in kv.stretches.items():
        layers = {layer for (layer, _), window in kv.window_of.items() if window == every}
        lines.append(
            f"llama_kv_cache_init: {len(layers)} layers compress {every[1]} tokens to one of {cells.n_cells} cells each"
        )
    nbytes = sum(kv.nbytes(name) for name in ("cv", "cg", "iv", "ig"))
    size = f"tokens to be compressed (f32) = {nbytes / MIB:8.2f} MiB"
    return [*lines, f"llama_kv_cache_init: {size}"] if lines else []


def index_cache_lines(context: Context) -> list[str]:
    """Size of the cached keys of indexers, if there are any."""
    nbytes, kind = context.kv.nbytes("ki"), registry.by_id(context.graph_params.type_indexer).name
    size = f"index keys ({kind}) of sparse attention = {nbytes / MIB:8.2f} MiB"
    return [f"llama_kv_cache_init: {size}"] if nbytes else []


def state_lines(states: RecurrentStates | None, buffers: Mapping[str, int]) -> list[str]:
    """Size of the states of recurrent layers, R of the convolutions and S of the recurrences; none without any.

    buffers: their bytes in host memory ("CPU") and on each device, where there are devices.
    """
    if states is None:
        return []
    total = states.nbytes / MIB
    recurrences = sum(v.buffer.nbytes for (_, name), v in states.tensors.items() if name in ("delta", "ssm")) / MIB
    n, n_layers = states.n_sequences, len({layer for layer, _ in states.tensors})
    where = [
        f"llama_memory_recurrent: {name:>10} RS buffer size = {size / MIB:8.2f} MiB" for name, size in buffers.items()
    ]
    copies = []
    if states.n_kept:
        nbytes = states.nbytes - states.n_sequences * states.slot_nbytes
        copies.append(
            f"llama_memory_recurrent: of these {nbytes / MIB:.2f} MiB are copies of {states.n_kept} states of every "
            "sequence, for drafts (--draft-max)"
        )
    return [
        *where,
        f"llama_memory_recurrent: size = {total:7.2f} MiB ({n:6} cells, {n_layers:3} layers, {n:2} seqs), "
        f"R (f32): {total - recurrences:7.2f} MiB, S (f32): {recurrences:7.2f} MiB",
        *copies,
    ]


def compute_buffer_line(n_bytes: int, backend: str = "CPU") -> str:
    """Size of the compute buffer."""
    return buffer_line("compute", n_bytes, backend)


def buffer_line(what: str, n_bytes: int, backend: str) -> str:
    """Size of a buffer of a context."""
    return f"{CONTEXT}{backend:>10} {what} buffer size = {n_bytes / MIB:8.2f} MiB"


def left_out_line(backend: str, sizes: Mapping[str, int]) -> str:
    """Tensors that have their place on a device and are not copied there, by name with their bytes."""
    what = f"{len(sizes)} tensors" if len(sizes) > 1 else next(iter(sizes))
    return f"note: {what} ({sum(sizes.values()) / MIB:.2f} MiB) not copied to {backend}: no op reads them there"


def graph_lines(n_nodes: int, n_splits: int) -> list[str]:
    """Size of the graph of a single token, and in how many parts devices run it."""
    return [f"{CONTEXT}graph nodes  = {n_nodes}", f"{CONTEXT}graph splits = {n_splits}"]


def system_info_line(n_threads: int, n_threads_batch: int | None, hardware: int, flags: Mapping[str, bool]) -> str:
    """Threads and CPU features; `n_threads_batch` is shown only when it was given."""
    threads = f"n_threads = {n_threads}"
    if n_threads_batch is not None:
        threads += f" (n_threads_batch = {n_threads_batch})"
    features = "".join(f"{name} = {int(on)} | " for name, on in flags.items())
    return f"system_info: {threads} / {hardware} | {features}"


# -- timings -----------------------------------------------------------------------------------------------


@dataclass
class Timings:
    """Times in seconds and counts since the start of a tool."""

    load: float = 0.0
    sample: float = 0.0
    n_sample: int = 0
    prompt: float = 0.0
    n_prompt: int = 0
    generate: float = 0.0
    n_generate: int = 0
    total: float = 0.0

    def add_decode(self, n_tokens: int, seconds: float) -> None:
        """Count a decode call: one token is generation, more are prompt processing."""
        if n_tokens == 1:
            self.n_generate += 1
            self.generate += seconds
        else:
            self.n_prompt += n_tokens
            self.prompt += seconds


def timing_lines(timings: Timings) -> list[str]:
    """The block printed when a tool ends, with an empty line before it."""
    sampled, generated = max(timings.n_sample, 1), max(timings.n_generate, 1)
    prefix = "llama_print_timings: "
    return [
        "",
        f"{prefix}       load time = {timings.load * 1e3:10.2f} ms",
        f"{prefix}     sample time = {_rate(timings.sample, sampled, 'runs  ')}",
        f"{prefix}prompt eval time = {_rate(timings.prompt, timings.n_prompt, 'tokens')}",
        f"{prefix}       eval time = {_rate(timings.generate, generated, 'runs  ')}",
        f"{prefix}      total time = {timings.total * 1e3:10.2f} ms / {timings.n_prompt + generated:5} tokens",
    ]


def _rate(seconds: float, count: int, unit: str) -> str:
    milliseconds = seconds * 1e3
    per_token = milliseconds / count if count else 0.0
    per_second = count / seconds if seconds else (float("inf") if count else 0.0)
    return (
        f"{milliseconds:10.2f} ms / {count:5} {unit} "
        f"({per_token:8.2f} ms per token, {per_second:8.2f} tokens per second)"
    )
