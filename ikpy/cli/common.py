"""What the common tools share: reading parameters, loading the model with its log lines, contexts, timings."""

from __future__ import annotations

import sys
import time
from collections import ChainMap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ikpy.cli.params import CommonParams
from ikpy.cli.parser import parse

if TYPE_CHECKING:
    import numpy as np

    from ikpy.engine.batch import Batch
    from ikpy.engine.context import Context
    from ikpy.engine.model import Model
    from ikpy.tools.logs import Timings
    from ikpy.vocab import Vocab


def start(tool: str, arguments: Sequence[str], title: str) -> CommonParams | None:
    """Parameters of a tool, or None when it only had to print help or version. Warnings go to standard error."""
    params = parse(arguments, tool)
    if params.action == "help":
        from ikpy.cli.help import print_tool_help

        print_tool_help(tool, title)
        return None
    if params.action == "version":
        from ikpy.tools.machine import version_lines

        print(*version_lines(), sep="\n", file=sys.stderr)
        return None
    for line in params.warnings:
        print(f"warning: {line}", file=sys.stderr)
    return params


@dataclass
class Session:
    """A loaded model with its vocabulary, log and timings."""

    params: CommonParams
    model: Model
    vocab: Vocab
    path: str
    timings: Timings
    started: float = field(default_factory=time.perf_counter)

    def log(self, lines: Iterable[str]) -> None:
        """Print log lines unless --log-disable was given."""
        print_log(self.params, lines)

    def new_context(self, **changes: Any) -> Context:
        """A context with the parameters of the command line and its log lines; `changes` replaces single ones."""
        from ikpy.engine.context import Context

        context_params = self.params.context_params(**changes)
        n_ctx_train = self.model.hparams.n_ctx_train
        if context_params.n_ctx > n_ctx_train:
            self.log(
                [
                    f"main: warning: model was trained on only {n_ctx_train} context tokens "
                    f"({context_params.n_ctx} specified)"
                ]
            )
        context = Context(self.model, context_params, log=lambda line: self.log([line]))
        self.log(context_log(self, context))
        return context

    def decode(self, context: Context, batch: Batch) -> np.ndarray:
        """Decode a batch and count its time."""
        began = time.perf_counter()
        logits = context.decode(batch)
        self.timings.add_decode(len(batch), time.perf_counter() - began)
        return logits

    def system_info(self) -> None:
        """Print the empty line and the system_info line."""
        from ikpy.threads import hardware_threads
        from ikpy.tools.cpu_features import feature_flags
        from ikpy.tools.logs import system_info_line

        params = self.params
        batch_threads = params.context.n_threads_batch
        self.log(["", system_info_line(params.n_threads, batch_threads, hardware_threads(), feature_flags())])

    def reset_timings(self) -> None:
        """Forget what was decoded so far; the load time stays."""
        from ikpy.tools.logs import Timings

        load = self.timings.load
        self.timings.__dict__.update(Timings(load=load).__dict__)

    def finish(self) -> None:
        """Print the timings block."""
        from ikpy.tools.logs import timing_lines

        self.timings.total = time.perf_counter() - self.started
        self.log(timing_lines(self.timings))


def print_log(params: CommonParams, lines: Iterable[str]) -> None:
    """Print lines on standard error unless --log-disable was given."""
    if not params.log.disable:
        for line in lines:
            print(line.encode("utf-8", "replace").decode("utf-8"), file=sys.stderr)
        sys.stderr.flush()


def model_path(params: CommonParams) -> str:
    """The model file, or the bundled one."""
    return default_model() if params.model.path is None else params.model.path


def default_model() -> str:
    """Path of the bundled model, which is noted on standard error."""
    import ikpy

    path = str(ikpy.default_model_path())
    print(f"no model given with -m: using the bundled tiny-mla-moe ({path})", file=sys.stderr)
    return path


def load(params: CommonParams) -> Session:
    """Load the model named by the parameters with the log lines of loading.

    With --dry-run the plan is printed and the process ends.

    Raises:
        IkpyError: the file is missing, damaged or of an unsupported kind.
    """
    from ikpy.gguf.reader import GGUFFile
    from ikpy.tools import logs
    from ikpy.vocab import Vocab

    started = time.perf_counter()
    path = model_path(params)
    with GGUFFile.open(path, header_only=params.model.dry_run) as file:
        print_log(params, logs.loader_lines(file, path, dump=not params.log.minilog))
        print_log(params, (logs.override_line(key, value) for key, value in params.model.kv_overrides))
        metadata = ChainMap(dict(params.model.kv_overrides), file.metadata)  # type: ignore[arg-type]
        vocab = Vocab.from_metadata(metadata)
        print_log(params, logs.vocab_lines(vocab))
        print_log(params, logs.meta_lines(file, rope_type=rope_type(file)))
        print_log(params, logs.vocab_summary_lines(vocab, metadata))
        print_log(params, [simd_banner()])
        if params.model.dry_run:
            print_log(params, plan_lines(params, file))
            raise SystemExit(0)
    from ikpy.engine.model import Model

    model = Model.load(path, params.model_params(), log=lambda line: print_log(params, [line]))
    timings = logs.Timings(load=time.perf_counter() - started)
    return Session(params, model, vocab, path, timings, started)


def rope_type(file: Any) -> int:
    """Number of the RoPE pairing in the summary: 2 for half-split pairs, 0 for adjacent pairs."""
    from ikpy.models import architecture

    return 2 if architecture(file.get("general.architecture", "")).rope_neox else 0


def simd_banner() -> str:
    """Whether the fastest native core is in use."""
    from ikpy._native import tier

    state = "is defined" if tier == "avx512" else "is NOT defined"
    return f"======================================= HAVE_FANCY_SIMD {state}"


def plan_lines(params: CommonParams, file: Any) -> list[str]:
    """Memory a run would take, from the header alone."""
    from ikpy.tools import logs

    context = params.context
    n_ctx = context.n_ctx or int(file.get(f"{file.get('general.architecture')}.context_length", 0))
    padding = 256 if context.flash_attn else 32
    n_ctx = -(-n_ctx // padding) * padding
    k, v, latent = logs.kv_cache_bytes(file, n_ctx, context.type_k, context.type_v, context.mla, context.flash_attn)
    weights = logs.ModelSize.of(file).n_bytes
    return [
        f"llm_load_tensors: {'CPU':>10} buffer size = {weights / logs.MIB:8.2f} MiB",
        *logs.kv_cache_lines(k, v, context.type_k, context.type_v, latent=latent),
        f"Memory required for model tensors + cache: {(weights + k + v) / logs.MIB:.0f} MiB",
    ]


def context_log(session: Session, context: Context) -> list[str]:
    """Log lines of a new context."""
    from ikpy.tools import logs

    params = context.params
    hparams = session.model.hparams
    mla = context.graph_params.mla
    has_latent = session.model.gguf.get(f"{hparams.arch}.attention.kv_lora_rank") is not None
    reduction = params.smart_expert_reduction
    lines = logs.context_lines(
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
            "k_cache_hadam": 0,
            "v_cache_hadam": 0,
            "ser": f"{reduction[0]}, {reduction[1]:g}",
            "freq_base": f"{params.rope_freq_base or hparams.rope_freq_base:.1f}",
            "freq_scale": f"{params.rope_freq_scale or hparams.rope_freq_scale:g}",
        }
    )
    latent = context.kv.nbytes("kv")
    k, v = (latent, 0) if latent else (context.kv.nbytes("k"), context.kv.nbytes("v"))
    lines += logs.kv_cache_lines(k, v, params.type_k, params.type_v, latent=latent > 0)
    lines.append(logs.compute_buffer_line(context.compute_bytes))
    return lines
