"""What the common tools share: reading parameters, loading the model with its log lines, contexts, timings."""

from __future__ import annotations

import sys
import time
from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ikpy.cli.checks import check_before_loading
from ikpy.cli.params import CommonParams
from ikpy.cli.parser import parse, suggest
from ikpy.cli.values import MAX_THREADS
from ikpy.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ikpy.engine.adapter import LoraAdapter
    from ikpy.engine.batch import Batch
    from ikpy.engine.context import Context
    from ikpy.engine.model import Model
    from ikpy.engine.params import ModelParams
    from ikpy.engine.speculative import Speculation, SpeculativeParams
    from ikpy.tools.run_logs import Timings
    from ikpy.vocab import Vocab


def start(tool: str, arguments: Sequence[str], title: str) -> CommonParams | None:
    """Parameters of a tool, or None when it only had to print help or version. Warnings go to standard error."""
    params = parse(arguments, tool)
    if params.action == "help":
        from ikpy.cli.help import print_tool_help

        print_tool_help(tool, title)
        return None
    if params.action == "devices":
        print_devices()
        return None
    if params.action == "version":
        from ikpy.tools.machine import version_lines

        print(*version_lines(), sep="\n", file=sys.stderr)
        return None
    for line in params.warnings:
        print(f"warning: {line}", file=sys.stderr)
    limit = place_on_nodes(params.model.numa)
    warn_of_threads(params.n_threads, params.n_threads_batch)
    for options in (params.context, params.speculative):
        for name in ("n_threads", "n_threads_batch"):
            if (n := getattr(options, name)) is not None:
                setattr(options, name, min(n, limit))
    return params


def warn_of_threads(*counts: int) -> None:
    """Say on standard error that more threads than CPUs wait for each other most of the time."""
    from ikpy.threads import hardware_threads

    if (most := max(counts)) > (n := hardware_threads()):
        print(f"warning: {most} threads on {n} CPUs wait for each other; -t {n} is faster", file=sys.stderr)


def print_devices() -> None:
    """Print the devices of this machine on standard output."""
    from ikpy.backends.cuda.devices import available

    print("Available devices:", *(f"  {device.name}: {device.description}" for device in available()), sep="\n")


def place_on_nodes(mode: str | None) -> int:
    """Does what --numa says, with lines on standard error; returns the largest number of threads that it leaves."""
    from ikpy import numa, threads

    if mode is None:
        if line := numa.advice():
            print(line, file=sys.stderr)
        return MAX_THREADS
    numa.apply(mode, lambda line: print(line, file=sys.stderr))
    # Threads wait for each other actively: more of them than CPUs only get in each other's way.
    return threads.hardware_threads() if mode == "isolate" else MAX_THREADS


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

        if self.model.arch.is_encoder and self.params.tool != "server":
            arch = self.model.hparams.arch
            raise UsageError(
                f"a model of architecture '{arch}' embeds texts only: use ikpy server --embeddings or ikpy.LLM.embed"
            )
        context_params = self.params.context_params(**changes)
        n_ctx_train = self.model.hparams.n_ctx_train
        if context_params.n_ctx > n_ctx_train:
            self.log(
                [
                    f"main: warning: model was trained on only {n_ctx_train} context tokens "
                    f"({context_params.n_ctx} specified)"
                ]
            )
        context_params.adapters = self.adapters
        context = Context(self.model, context_params, log=lambda line: self.log([line]))
        context.adapter_scales[:] = [
            0.0 if self.params.model.lora_off else scale for _, scale in self.params.model.lora
        ]
        context.steer(self.directions)
        self.log(context_log(self, context))
        if self.params.model.dry_run:
            self.log(plan_lines(context))
            raise SystemExit(0)
        return context

    @cached_property
    def adapters(self) -> list[LoraAdapter]:
        """LoRA adapters of the command line."""
        from ikpy.engine.adapter import LoraAdapter

        return [LoraAdapter.load(path, self.model) for path, _ in self.params.model.lora]

    @cached_property
    def directions(self) -> NDArray[np.float32] | None:
        """Sum of the control vectors of the command line, float32 [n_layer, n_embd]; None without any."""
        from ikpy.engine.control_vector import in_range, load_control_vector

        options, hp = self.params.model, self.model.hparams
        parts = [scale * load_control_vector(path, hp.n_layer, hp.n_embd) for path, scale in options.control_vectors]
        return in_range(sum(parts), *options.control_layers) if parts else None  # type: ignore[arg-type]

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
        from ikpy.tools.run_logs import system_info_line

        params = self.params
        batch_threads = params.context.n_threads_batch
        self.log(["", system_info_line(params.n_threads, batch_threads, hardware_threads(), feature_flags())])

    def reset_timings(self) -> None:
        """Forget what was decoded so far; the load time stays."""
        from ikpy.tools.run_logs import Timings

        load = self.timings.load
        self.timings.__dict__.update(Timings(load=load).__dict__)

    def finish(self) -> None:
        """Print the timings block."""
        from ikpy.tools.run_logs import timing_lines

        self.timings.total = time.perf_counter() - self.started
        self.log(timing_lines(self.timings))


def print_log(params: CommonParams, lines: Iterable[str]) -> None:
    """Print lines on standard error unless --log-disable was given."""
    if not params.log.disable:
        for line in lines:
            print(line.encode("utf-8", "replace").decode("utf-8"), file=sys.stderr)
        sys.stderr.flush()


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


def model_path(params: CommonParams) -> str:
    """The model file, one of the hub or of a URL, or the bundled one."""
    model = params.model
    if model.path is None and model.url is not None:
        from ikpy.tools.download import fetch_url

        path = fetch_url(model.url, model.hf_token, lambda line: print_log(params, [line]), offline=model.offline)
        model.alias = model.alias or Path(path).stem
        return path
    if model.path is None and model.hf_repo is not None:
        model.alias = model.alias or model.hf_repo
        return fetch_hub(params, model.hf_repo, model.hf_file)
    return default_model() if params.model.path is None else params.model.path


def fetch_hub(params: CommonParams, repository: str, file: str | None) -> str:
    """The file of a model on the hub, with the token of the command line, from the cache only if --offline says so."""
    from ikpy.tools.hub import fetch

    model = params.model
    return fetch(repository, file, model.hf_token, lambda line: print_log(params, [line]), offline=model.offline)


def default_model() -> str:
    """Path of the bundled model, which is noted on standard error."""
    import ikpy

    path = str(ikpy.default_model_path())
    print(f"no model given with -m: using the bundled tiny-mla-moe ({path})", file=sys.stderr)
    return path


def load(params: CommonParams, **context_changes: Any) -> Session:
    """Load the model named by the parameters with the log lines of loading.

    context_changes: what the tool will change of the context's parameters, for --fit and the checks before loading.
    With --dry-run only its header is read; the first context of the session prints the plan and ends the process.

    Raises:
        IkpyError: the file is missing, damaged or of an unsupported kind.
    """
    from ikpy.engine.model import Model, open_model
    from ikpy.graph.placement import policy_lines
    from ikpy.tools import model_logs, run_logs
    from ikpy.vocab import Vocab

    drafter = params.speculative
    if drafter.hf_repo is not None and drafter.model_draft is None:
        drafter.model_draft = fetch_hub(params, drafter.hf_repo, None)
    check_before_loading(params, context_changes)
    started = time.perf_counter()
    path = model_path(params)
    model_params = params.model_params()
    with ProgressDots(params) as dots:
        file = open_model(path, model_params, dots)
    if params.model.huge_pages and not model_params.header_only:
        print_log(params, [model_logs.huge_page_line(file)])
    if params.model.numa:
        from ikpy import numa

        mapped = [shard.data for shard in file.shards if shard.mapped]
        print_log(params, filter(None, [numa.advice_on_file(params.model.numa, mapped)]))
    print_log(params, model_logs.loader_lines(file, path, dump=not params.log.minilog))
    print_log(params, (model_logs.override_line(key, value) for key, value in params.model.kv_overrides))
    warn_of_new_keys(params, file.metadata)
    metadata = ChainMap(dict(params.model.kv_overrides), file.metadata)  # type: ignore[arg-type]
    vocab = Vocab.from_metadata(metadata)
    print_log(params, model_logs.vocab_lines(vocab))
    print_log(params, model_logs.meta_lines(file, rope_type=rope_type(file)))
    print_log(params, model_logs.vocab_summary_lines(vocab, metadata))
    print_log(params, [simd_banner(), *policy_lines(params.model.offload_policy)])
    place_automatically(params, path, model_params, context_changes)
    with ProgressDots(params) as dots:
        model = Model.load(file, model_params, log=dots.log, progress=None if model_params.header_only else dots)
    timings = run_logs.Timings(load=time.perf_counter() - started)
    return Session(params, model, vocab, path, timings, started)


def warn_of_new_keys(params: CommonParams, metadata: Mapping[str, Any]) -> None:
    """Names overrides of keys that the file lacks: most are misspelled, and such a key changes nothing."""
    for key, _ in params.model.kv_overrides:
        if key not in metadata:
            print(f"warning: --override-kv {key}: the file has no such key{suggest(key, metadata)}", file=sys.stderr)


def place_automatically(
    params: CommonParams, path: str, model_params: ModelParams, context_changes: Mapping[str, Any]
) -> None:
    """Sets the placement that --fit finds for this context, if it is asked for."""
    if not params.model.fit:
        return
    from ikpy.engine.fit import fit

    model_params.placement = fit(
        path,
        model_params,
        params.context_params(**context_changes),
        margin=params.model.fit_margin,
        margins=params.model.fit_margins,
        log=lambda line: print_log(params, [line]),
    )


def rope_type(file: Any) -> int:
    """Number of the RoPE pairing in the summary: 2 for half-split pairs, 0 for adjacent pairs."""
    from ikpy.models import architecture

    return 2 if architecture(str(file.get("general.architecture", ""))).rope_neox else 0


def bench_numbers(params: CommonParams, n_ctx: int) -> dict[str, Any]:
    """Fields of `BenchSettings` for a context of ``n_ctx`` tokens."""
    context = params.context
    return {
        "n_kv_max": n_ctx,
        "n_batch": context.n_batch,
        "n_ubatch": context.n_ubatch or context.n_batch,
        "flash_attn": context.flash_attn,
        "n_gpu_layers": params.model.n_gpu_layers,
        "n_threads": params.n_threads,
        "n_threads_batch": params.n_threads_batch,
        "warmup": context.warmup,
    }


def speculation(session: Session, n_seq: int = 1) -> Speculation | None:
    """Drafters of the command line for ``n_seq`` sequences, None without any."""
    options = session.params.speculative
    if options.model_draft is None and not options.types:
        return None
    from ikpy.tools.speculation import DraftFiles, make_speculation

    files = DraftFiles(options.model_draft, options.suffix_corpus, options.lookup_static, options.lookup_dynamic)
    n_threads = options.n_threads or session.params.n_threads
    changes: dict[str, Any] = {
        "n_ctx": options.n_ctx or session.params.context.n_ctx,
        "n_seq_max": n_seq,
        "n_threads": n_threads,
        "n_threads_batch": options.n_threads_batch or options.n_threads or session.params.n_threads_batch,
        "embeddings": False,
    }
    changes |= dict.fromkeys(("type_k_first", "type_k_last", "type_v_first", "type_v_last"))
    changes |= {name: value for name in ("type_k", "type_v") if (value := getattr(options, name)) is not None}
    settings = speculative_params(session.params)
    if settings.n_min > settings.n_max:
        session.log([f"warning: no drafts: --draft-min {settings.n_min} is above --draft-max {settings.n_max}"])
    found = make_speculation(
        settings,
        session.vocab,
        files,
        draft_params=session.params.context_params(**changes),
        model=session.model,
        log=lambda line: session.log([line]),
    )
    if found is not None:
        session.log([f"main: speculative decoding: {', '.join(d.name for d in found.speculator().drafters)}"])
    return found


def reads_states(session: Session) -> bool:
    """Whether a drafter reads the states of the context's tokens. UsageError if the model has no such drafter."""
    if "mtp" not in speculative_params(session.params).types:
        return False
    session.model.prediction_head()
    return True


def speculative_params(params: CommonParams) -> SpeculativeParams:
    """Settings of the drafters; those behind a type hold for all, as the last use of an option does."""
    from ikpy.cli.values import to_draft_settings
    from ikpy.engine.speculative import SpeculativeParams

    values = dict(params.speculative.settings)
    types = []
    for entry in params.speculative.types:
        name, _, settings = entry.partition(":")
        types.append(name)
        if settings:
            values |= dict(to_draft_settings(settings, lambda _: None))
    return SpeculativeParams(types=tuple(types), **values)


def simd_banner() -> str:
    """Whether the fastest native core is in use."""
    from ikpy._native import tier

    state = "is defined" if tier == "avx512" else "is NOT defined"
    return f"======================================= HAVE_FANCY_SIMD {state}"


def context_log(session: Session, context: Context) -> list[str]:
    """Log lines of a new context."""
    from ikpy.tools import run_logs

    params = context.params
    hparams = session.model.hparams
    mla = context.graph_params.mla
    has_latent = session.model.gguf.get(f"{hparams.arch}.attention.kv_lora_rank") is not None
    reduction = params.smart_expert_reduction
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
            "freq_base": f"{params.rope_freq_base or hparams.rope_freq_base:.1f}",
            "freq_scale": f"{params.rope_freq_scale or hparams.rope_freq_scale:g}",
        }
    )
    latent = context.kv.nbytes("kv") + context.kv.nbytes("kr")
    k, v = (latent, 0) if latent else (context.kv.nbytes("k"), context.kv.nbytes("v"))
    lines += run_logs.window_cache_lines(context)
    devices = context.devices
    buffers = devices.cache_bytes() if devices else None
    lines += run_logs.kv_cache_lines(
        k, v, *run_logs.cache_type_names(context.graph_params), latent=latent > 0, buffers=buffers
    )
    if devices:
        lines += [run_logs.compute_buffer_line(need.compute_bytes, name) for name, need in devices.needs.items()]
    lines.append(run_logs.compute_buffer_line(context.compute_bytes))
    return lines + run_logs.graph_lines(context.n_graph_nodes, context.n_graph_splits)


def plan_lines(context: Context) -> list[str]:
    """Everything that a run would allocate."""
    from ikpy.engine.memory import memory_report
    from ikpy.tools.run_logs import MIB

    report = memory_report(context)
    tensors_and_cache = report.total - context.compute_bytes
    return [*report.lines(), f"Memory required for model tensors + cache: {tensors_and_cache / MIB:.0f} MiB"]
