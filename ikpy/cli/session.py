"""A session of a common tool: the model loaded with its log lines, contexts, timings."""

from __future__ import annotations

import sys
import time
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ikpy.cli.checks import check_before_loading
from ikpy.cli.logs import (
    ProgressDots,
    adapter_line,
    context_log,
    control_vector_lines,
    plan_lines,
    print_log,
    simd_banner,
)
from ikpy.cli.model_files import fetch_hub, model_path, read_vocab
from ikpy.cli.params import CommonParams
from ikpy.cli.parser import suggest
from ikpy.errors import IkpyError, UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ikpy.engine.adapter import LoraAdapter
    from ikpy.engine.batch import Batch
    from ikpy.engine.context import Context
    from ikpy.engine.model import Model
    from ikpy.engine.params import ContextParams, ModelParams
    from ikpy.gguf.reader import GGUFFile
    from ikpy.tools.media_tokens import Encoders, MediaReader
    from ikpy.tools.run_logs import Timings
    from ikpy.vocab import Vocab


@dataclass
class Session:
    """A loaded model with its vocabulary, log and timings."""

    params: CommonParams
    model: Model
    vocab: Vocab
    path: str
    timings: Timings
    started: float = field(default_factory=time.perf_counter)
    projector: Encoders | None = None
    draft_params: ModelParams | None = None
    """How the draft model is loaded, if there is one."""

    def log(self, lines: Iterable[str]) -> None:
        """Print log lines unless --log-disable was given."""
        print_log(self.params, lines)

    def new_context(self, **changes: Any) -> Context:
        """A context with the parameters of the command line and its log lines; `changes` replaces single ones."""
        from ikpy.engine.context import Context
        from ikpy.engine.encoded_texts import needs_texts

        if self.model.arch.is_encoder and self.params.tool != "server":
            arch = self.model.hparams.arch
            raise UsageError(
                f"a model of architecture '{arch}' embeds texts only: use ikpy server --embeddings or ikpy.LLM.embed"
            )
        if self.model.arch.decoder_start is not None and self.params.tool not in ("server", "cli"):
            raise needs_texts(self.model)
        context_params = self.params.context_params(**changes)
        n_ctx_train = self.model.hparams.n_ctx_train
        n_ctx = context_params.n_ctx // context_params.n_seq_max
        if n_ctx > n_ctx_train:
            each = " for each sequence" if context_params.n_seq_max > 1 else ""
            warning = f"main: warning: model was trained on only {n_ctx_train} context tokens ({n_ctx} specified{each})"
            self.log([warning])
        context_params.adapters = self.adapters
        context_params.media = self.media.store if self.media is not None else None
        context = Context(self.model, context_params, log=lambda line: self.log([line]))
        context.adapter_scales[:] = self.adapter_scales
        context.steer(self.directions)
        self.log(context_log(context))
        if self.params.model.dry_run:
            from ikpy.cli.drafters import speculation

            drafts = speculation(self, context, context_params.n_seq_max if self.params.tool == "server" else 1)
            print(*plan_lines(context, drafts), sep="\n", file=sys.stderr)  # what was asked for, no log
            raise SystemExit(0)
        return context

    @cached_property
    def media(self) -> MediaReader | None:
        """What gives pictures and sounds their tokens, if there is a projector, or a text for an encoder its ids."""
        from ikpy.tools.encoded_prompts import PromptReader
        from ikpy.tools.media_tokens import STORE_BYTES, new_reader

        if self.model.arch.decoder_start is not None:
            if self.projector is not None:
                raise UsageError(f"{self.model.hparams.arch} models read tokens only, no pictures and sounds")
            return PromptReader(self.model.hparams.n_vocab, self.vocab)
        if self.projector is None or self.params.model.dry_run:
            return None
        n_bytes = STORE_BYTES if self.params.tool == "server" else None
        with used_if_possible(self.params):
            return new_reader(self.projector, self.model, self.vocab, lambda line: self.log([line]), n_bytes)
        self.projector = None  # with what it has taken of a device
        return None

    @cached_property
    def adapters(self) -> list[LoraAdapter]:
        """LoRA adapters of the command line."""
        from ikpy.engine.adapter import LoraAdapter

        adapters = [LoraAdapter.load(path, self.model) for path, _ in self.params.model.lora]
        self.log(map(adapter_line, adapters, self.adapter_scales))
        return adapters

    @property
    def adapter_scales(self) -> list[float]:
        """Scales that the adapters start with."""
        model = self.params.model
        return [0.0 if model.lora_off else scale for _, scale in model.lora]

    @cached_property
    def directions(self) -> NDArray[np.float32] | None:
        """Sum of the control vectors of the command line, float32 [n_layer, n_embd]; None without any."""
        from ikpy.engine.control_vector import in_range, load_control_vector

        options, hp = self.params.model, self.model.hparams
        if not options.control_vectors:
            return None
        parts = [scale * load_control_vector(path, hp.n_layer, hp.n_embd) for path, scale in options.control_vectors]
        rows = in_range(sum(parts), *options.control_layers)  # type: ignore[arg-type]
        self.log(control_vector_lines(options.control_vectors, rows))
        return rows

    def decode(self, context: Context, batch: Batch) -> np.ndarray:
        """Decode a batch and count its time."""
        began = time.perf_counter()
        logits = context.decode(batch)
        self.timings.add_decode(len(batch), time.perf_counter() - began)
        return logits

    def system_info(self) -> None:
        """Print the empty line and the system_info line."""
        from ikpy.machine.threads import hardware_threads
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
        """Print the timings block, unless --no-perf was given."""
        from ikpy.tools.run_logs import timing_lines

        self.timings.total = time.perf_counter() - self.started
        if self.params.log.timings:
            self.log(timing_lines(self.timings))


def load(params: CommonParams, **context_changes: Any) -> Session:
    """Load the model named by the parameters with the log lines of loading.

    context_changes: what the tool will change of the context's parameters, for --fit and the checks before loading.
    With --dry-run only its header is read; the first context of the session prints the plan and ends the process.

    Raises:
        IkpyError: the file is missing, damaged or of an unsupported kind.
    """
    from ikpy.cli.drafters import bytes_of_drafter, draft_model_params
    from ikpy.engine.model import Model, open_model
    from ikpy.tools import run_logs

    drafter = params.speculative
    if drafter.hf_repo is not None and drafter.model_draft is None:
        drafter.model_draft = fetch_hub(params, drafter.hf_repo, None)
    check_before_loading(params, context_changes)
    started = time.perf_counter()
    path = model_path(params)
    projector = checked_projector(params)
    check_adapters_fit(params, path)
    model_params = params.model_params()
    read = not (model_params.use_mmap or model_params.header_only)
    file = open_model(path, replace(model_params, use_mmap=True))  # checks all but the data before it is read
    vocab = show_file(params, file, path)
    opened, model_params = open_projector(params, projector, file, vocab, model_params)
    draft_params = draft_model_params(params, model_params)
    if draft_params is not None:
        reserved = bytes_of_drafter(params, file, vocab, model_params, draft_params)
        model_params.placement = replace(model_params.placement, reserved=tuple(reserved.items()))
    place_automatically(params, path, model_params, draft_params, context_changes)
    with ProgressDots(params) as dots:
        file = open_model(path, model_params, dots) if read else file
    log_memory(params, file)
    with ProgressDots(params) as dots:
        model = Model.load(file, model_params, log=dots.log, progress=None if model_params.header_only else dots)
    timings = run_logs.Timings(load=time.perf_counter() - started)
    return Session(params, model, vocab, path, timings, started, opened, draft_params)


@contextmanager
def used_if_possible(params: CommonParams) -> Iterator[None]:
    """Goes on with a warning where a projector cannot be used that the command line does not name."""
    try:
        yield
    except IkpyError as error:
        if params.media.projector is not None or params.media.url is not None:
            raise
        print(f"warning: no pictures and sounds: {error}", file=sys.stderr)


def checked_projector(params: CommonParams) -> str | None:
    """The projector file, whose header tells a type that is known; None if there is none."""
    from ikpy.cli.model_files import projector_path

    with used_if_possible(params):
        if (path := projector_path(params)) is not None:
            from ikpy.gguf.reader import GGUFFile
            from ikpy.sound.projector import known_encoders

            with GGUFFile.open(path, header_only=True) as file:
                known_encoders(file)
        return path
    return None


def open_projector(
    params: CommonParams, path: str | None, file: GGUFFile, vocab: Vocab, model_params: ModelParams
) -> tuple[Encoders | None, ModelParams]:
    """The projector of a file, if there is one, for a model, and the parameters to load the model with."""
    from ikpy.tools.media_tokens import ProjectorOptions, open_beside, picture_device

    if path is None:
        return None, model_params
    media = params.media

    def log(line: str) -> None:
        print_log(params, [line])

    device = picture_device(model_params, media.offload, log, media.device)
    n_threads = media.n_threads or params.n_threads_batch
    options = ProjectorOptions(n_threads, media.min_tokens, media.max_tokens, device)
    with used_if_possible(params):
        return open_beside(path, file, vocab, model_params, options, log)
    return None, model_params


def show_file(params: CommonParams, file: GGUFFile, path: str) -> Vocab:
    """Logs what the header of a model file says; its vocabulary. Needs no tensor data, which may take minutes to read.

    Raises:
        IkpyError: architecture or vocabulary is not supported.
    """
    from ikpy.graph.offload_policy import policy_lines
    from ikpy.tools import model_logs

    print_log(params, model_logs.loader_lines(file, path, dump=not params.log.minilog))
    print_log(params, (model_logs.override_line(key, value) for key, value in params.model.kv_overrides))
    warn_of_new_keys(params, file.metadata)
    metadata = ChainMap(dict(params.model.kv_overrides), file.metadata)  # type: ignore[arg-type]
    vocab = read_vocab(file, metadata)
    print_log(params, model_logs.vocab_lines(vocab))
    print_log(params, model_logs.meta_lines(file, rope_type=rope_type(file)))
    print_log(params, model_logs.vocab_summary_lines(vocab, metadata))
    print_log(params, [simd_banner(), *policy_lines(params.model.offload_policy)])
    return vocab


def log_memory(params: CommonParams, file: GGUFFile) -> None:
    """Logs where the bytes of a model file lie, as far as options ask for a place."""
    if params.model.huge_pages and not params.model.dry_run:
        from ikpy.tools.model_logs import huge_page_line

        print_log(params, [huge_page_line(file)])
    if params.model.numa:
        from ikpy.machine import numa

        mapped = [shard.data for shard in file.shards if shard.mapped]
        print_log(params, filter(None, [numa.advice_on_file(params.model.numa, mapped)]))


def check_adapters_fit(params: CommonParams, path: str) -> None:
    """FileFormatError for LoRA adapters of another architecture than the model's, before the model is read."""
    if not params.model.lora:
        return
    from ikpy.engine.adapter import check_adapter_file
    from ikpy.engine.model import check_holds_model
    from ikpy.gguf.reader import GGUFFile

    with GGUFFile.open(path, header_only=True) as file:
        check_holds_model(file)
        arch = str(file.get("general.architecture", ""))
    for adapter, _ in params.model.lora:
        check_adapter_file(adapter, arch)


def warn_of_new_keys(params: CommonParams, metadata: Mapping[str, Any]) -> None:
    """Names overrides of keys that the file lacks: most are misspelled, and such a key changes nothing."""
    for key, _ in params.model.kv_overrides:
        if key not in metadata:
            print(f"warning: --override-kv {key}: the file has no such key{suggest(key, metadata)}", file=sys.stderr)


def place_automatically(
    params: CommonParams,
    path: str,
    model_params: ModelParams,
    draft_params: ModelParams | None,
    context_changes: Mapping[str, Any],
) -> None:
    """Sets the placement that --fit finds for this context, if it is asked for."""
    if not params.model.fit:
        return
    import numpy as np

    from ikpy.cli.drafters import changes_for_drafts, tell_of_drafts
    from ikpy.engine.adapter import LoraAdapter
    from ikpy.engine.context import Context
    from ikpy.engine.fit import fit

    adapters: dict[str, LoraAdapter] = {}

    def context(model: Model, context_params: ContextParams) -> Context:
        if changes_for_drafts(params).get("token_states"):
            tell_of_drafts(params, model, draft_params)
        for name, _ in params.model.lora:
            adapters[name] = adapters.get(name) or LoraAdapter.load(name, model)
        used = [adapters[name] for name, _ in params.model.lora]
        found = Context(model, replace(context_params, adapters=used))
        if params.model.control_vectors:
            found.steer(np.zeros((model.hparams.n_layer, model.hparams.n_embd), np.float32))
        return found

    model_params.placement = fit(
        path,
        model_params,
        params.context_params(**context_changes),
        margin=params.model.fit_margin,
        margins=params.model.fit_margins,
        context=context,
        log=lambda line: print_log(params, [line]),
    )


def rope_type(file: Any) -> int:
    """Number of the RoPE pairing in the summary: 2 for half-split pairs, 0 for adjacent pairs, -1 without RoPE."""
    from ikpy.models import architecture

    arch = architecture(str(file.get("general.architecture", "")))
    return (2 if arch.rope_neox else 0) if arch.has_rope else -1


def bench_numbers(params: CommonParams, n_ctx: int) -> dict[str, Any]:
    """Fields of `BenchSettings` for a context of ``n_ctx`` tokens, as given; -ub 0 is what fits of the batch."""
    context = params.context
    return {
        "n_kv_max": n_ctx,
        "n_batch": context.n_batch,
        "n_ubatch": context.n_ubatch or min(context.n_batch, n_ctx or context.n_batch),
        "flash_attn": context.flash_attn,
        "n_gpu_layers": params.model.n_gpu_layers,
        "n_threads": params.n_threads,
        "n_threads_batch": params.n_threads_batch,
        "warmup": context.warmup,
    }
