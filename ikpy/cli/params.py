"""Parameters of the common tools, filled by the parser and handed to the engine.

Every default of a shared flag is declared here and nowhere else; the option table refers to a field by its dotted
path ("context.n_ctx"). Sampling fields carry the names of the request fields of the completion API.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from ikpy.cli.log_options import LogOptions
from ikpy.cli.media_options import MediaOptions
from ikpy.cli.thread_options import ThreadOptions
from ikpy.engine.prefix import PROMPT_TAIL
from ikpy.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from ikpy.engine.params import ContextParams, ModelParams
    from ikpy.graph.placement import DeviceParams, PlacementParams


@dataclass
class ModelOptions:
    """Which file is loaded and how its tensors are placed."""

    path: str | None = None
    url: str | None = None
    hf_repo: str | None = None
    hf_file: str | None = None
    hf_token: str | None = None
    offline: bool = False
    alias: str | None = None
    check_tensors: bool = False
    dry_run: bool = False
    kv_overrides: list[tuple[str, object]] = field(default_factory=list)
    tensor_overrides: list[tuple[str, str]] = field(default_factory=list)
    lora: list[tuple[str, float]] = field(default_factory=list)
    lora_off: bool = False
    control_vectors: list[tuple[str, float]] = field(default_factory=list)
    control_layers: tuple[int, int] = (-1, -1)
    n_gpu_layers: int = -1
    split_mode: str = "layer"
    main_gpu: int = 0
    tensor_split: tuple[float, ...] = ()
    devices: tuple[str, ...] | None = None
    rpc: tuple[str, ...] = ()
    n_cpu_moe: int = 0
    kv_offload: bool = True
    offload_policy: list[tuple[int, bool]] = field(default_factory=list)
    only_active_experts: bool = True
    cuda_params: dict[str, int] = field(default_factory=dict)
    fit: bool = False
    fit_margin: int = 1024
    fit_margins: dict[int, int] = field(default_factory=dict)
    fit_targets: list[int] = field(default_factory=list)
    use_mmap: bool = True
    huge_pages: bool = False
    use_mlock: bool = False
    lazy_mode: str = "auto"
    defer_experts: bool = False
    prefetch_experts: bool | None = None
    prefetch_threads: int = 4
    repack: bool = False
    load_mode: str = "auto"
    numa: str | None = None


@dataclass
class ContextOptions:
    """Shape of the context and how a batch is executed."""

    n_ctx: int = 0
    n_batch: int = 2048
    n_ubatch: int = 512
    n_parallel: int = 1
    n_threads: int | None = None
    n_threads_batch: int | None = None
    flash_attn: bool = True
    mla: int = 3
    attn_max_batch: int = 256
    smart_expert_reduction: tuple[int, float] = (-1, 0.0)
    grouped_experts: bool = False
    type_k: str = "f16"
    type_v: str = "f16"
    type_k_first: tuple[str, int] | None = None
    type_k_last: tuple[str, int] | None = None
    type_v_first: tuple[str, int] | None = None
    type_v_last: tuple[str, int] | None = None
    type_indexer: str = "f16"
    sparse_top_k: int = -1
    k_hadamard: bool = False
    v_hadamard: bool = False
    swa_full: bool = False
    rope_scaling: str | None = None
    rope_freq_base: float = 0.0
    rope_freq_scale: float = 0.0
    yarn_orig_ctx: int = 0
    yarn_ext_factor: float = -1.0
    yarn_attn_factor: float = -1.0
    yarn_beta_fast: float = -1.0
    yarn_beta_slow: float = -1.0
    pooling: str | None = None
    attention: str | None = None
    embeddings: bool = False
    reranking: bool = False
    warmup: bool = True


@dataclass
class PromptOptions:
    """Text given on the command line or read from files, and how the chat program shows it."""

    text: str = ""
    file: str | None = None
    binary_file: str | None = None
    escape: bool = True
    n_predict: int = -1
    n_keep: int = 0
    chunks: int = -1
    in_files: list[str] = field(default_factory=list)
    conversation: bool = False
    single_turn: bool = False
    simple_io: bool = False
    system: str | None = None
    interactive: bool = False
    interactive_first: bool = False
    multiline_input: bool = False
    color: bool = False
    special: bool = False
    display_prompt: bool = True
    verbose_prompt: bool = False
    in_prefix: str = ""
    in_suffix: str = ""
    in_prefix_bos: bool = False
    reverse_prompts: list[str] = field(default_factory=list)
    prompt_cache: str | None = None
    prompt_cache_all: bool = False
    prompt_cache_ro: bool = False
    print_token_count: int = -1
    cfg_negative_prompt: str = ""
    cfg_scale: float = 1.0
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class PerplexityOptions:
    """Modes of the perplexity tool."""

    stride: int = 0
    output_type: int = 0
    logits_file: str | None = None
    kl_divergence: bool = False
    hellaswag: bool = False
    hellaswag_tasks: int = 400
    winogrande: bool = False
    winogrande_tasks: int = 0
    multiple_choice: bool = False
    multiple_choice_tasks: int = 0


@dataclass
class SweepOptions:
    """Rows of the sweep benchmark."""

    warmup_batch: bool = False
    n_repetitions: int = 1
    stride: int = 1
    memory: bool = False
    output_format: str = "md"


@dataclass
class BatchedOptions:
    """Rows of the batched benchmark: all combinations of these numbers."""

    n_prompt: list[int] = field(default_factory=lambda: [512])
    n_generate: list[int] = field(default_factory=lambda: [128])
    n_sequences: list[int] = field(default_factory=lambda: [1])
    shared: bool = False
    separate: bool = False
    output_format: str = "md"


@dataclass
class ImatrixOptions:
    """Output of the importance matrix tool."""

    output: str = "imatrix.dat"
    output_format: str = "auto"
    output_draft: str | None = None
    output_frequency: int = 10
    save_frequency: int = 0
    process_output: bool = False
    predicts: bool = False
    output_tensor_name: str = "output.weight"
    compute_ppl: bool = True
    from_chunk: int = 0
    layer_similarity: bool = False
    parse_special: bool = False
    show_statistics: bool = False


@dataclass
class ServerOptions:
    """HTTP side of the server."""

    hosts: list[str] = field(default_factory=lambda: ["127.0.0.1"])
    port: int = 8080
    reuse_port: bool = False
    path: str | None = None
    webui: str = "auto"
    api_keys: list[str] = field(default_factory=list)
    api_key_files: list[str] = field(default_factory=list)
    models_dir: str | None = None
    models_preset: str | None = None
    models_autoload: bool = True
    sleep_idle_seconds: int = -1
    models_max: int = 4
    models_ttl: int = 0
    models_memory: int = 0
    api_prefix: str = ""
    props: bool = False
    cors: str | None = None
    ssl_key_file: str | None = None
    ssl_cert_file: str | None = None
    timeout: int = 600
    drain_seconds: float = 30.0
    log_format: str = "text"
    metrics: bool = False
    slots: bool = True
    slot_save_path: str | None = None
    slot_autosave: bool = False
    slot_prompt_similarity: float = 0.1
    cont_batching: bool = True
    queue_limit: int = 512
    cache_prompt: bool = True
    max_token_delay: float = 500.0
    sse_ping_interval: int = 30
    cache_reuse: int = 0
    cache_ram: int = 8192
    cache_ram_similarity: float = 0.5
    cache_ram_n_min: int = 0
    ctx_checkpoints: int = 32
    ctx_checkpoints_interval: int = 512
    ctx_checkpoints_tolerance: int = PROMPT_TAIL
    context_shift: bool = True
    reasoning_format: str = "deepseek"
    reasoning: str = "auto"
    reasoning_effort: str = "default"
    banned_strings: list[str] = field(default_factory=list)
    banned_n: int = 1
    reasoning_budget: int = -1
    reasoning_budget_message: str = ""
    skip_chat_parsing: bool = False
    prefill_assistant: bool = True
    parallel_tool_calls: bool = False
    spm_infill: bool = False


@dataclass
class SpeculativeOptions:
    """Speculative decoding: the draft model and what drafts without one."""

    model_draft: str | None = None
    hf_repo: str | None = None
    n_ctx: int = 0
    n_threads: int | None = None
    n_threads_batch: int | None = None
    type_k: str | None = None
    type_v: str | None = None
    n_gpu_layers: int | None = None
    devices: tuple[str, ...] | None = None
    tensor_overrides: list[tuple[str, str]] = field(default_factory=list)
    n_cpu_moe: int = 0
    types: list[str] = field(default_factory=list)
    settings: list[tuple[str, Any]] = field(default_factory=list)
    suffix_corpus: str | None = None
    lookup_static: str | None = None
    lookup_dynamic: str | None = None


@dataclass
class CommonParams:
    """Everything a common tool is started with.

    `tool` is the subcommand; `given` lists the options of the command line by their first spelling, in order, so that
    a tool can tell a default from the same value given by the user. `action` is run, help or version.
    """

    tool: str = "cli"
    model: ModelOptions = field(default_factory=ModelOptions)
    context: ContextOptions = field(default_factory=ContextOptions)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    prompt: PromptOptions = field(default_factory=PromptOptions)
    media: MediaOptions = field(default_factory=MediaOptions)
    log: LogOptions = field(default_factory=LogOptions)
    threads: ThreadOptions = field(default_factory=ThreadOptions)
    threads_batch: ThreadOptions = field(default_factory=ThreadOptions)
    threads_draft: ThreadOptions = field(default_factory=ThreadOptions)
    threads_batch_draft: ThreadOptions = field(default_factory=ThreadOptions)
    perplexity: PerplexityOptions = field(default_factory=PerplexityOptions)
    sweep: SweepOptions = field(default_factory=SweepOptions)
    batched: BatchedOptions = field(default_factory=BatchedOptions)
    imatrix: ImatrixOptions = field(default_factory=ImatrixOptions)
    server: ServerOptions = field(default_factory=ServerOptions)
    speculative: SpeculativeOptions = field(default_factory=SpeculativeOptions)
    config: str | None = None
    given: list[str] = field(default_factory=list)
    action: str = "run"
    warnings: list[str] = field(default_factory=list)

    @property
    def n_threads(self) -> int:
        """Generation threads; physical cores unless given."""
        from ikpy.machine.threads import physical_cores

        return self.context.n_threads or physical_cores()

    @property
    def n_threads_batch(self) -> int:
        """Prompt threads; the generation threads unless given."""
        return self.context.n_threads_batch or self.n_threads

    def model_params(self) -> ModelParams:
        """Load-time parameters of the engine."""
        from ikpy.engine.params import ModelParams

        model = self.model
        return ModelParams(
            mla=self.context.mla,
            use_mmap=model.use_mmap and not model.huge_pages,
            huge_pages=model.huge_pages,
            read_ahead=model.numa is None,
            use_mlock=model.use_mlock,
            fill=model.lazy_mode != "on",
            defer_experts=model.defer_experts,
            prefetch_experts=model.prefetch_experts,
            prefetch_threads=model.prefetch_threads,
            check_tensors=model.check_tensors,
            kv_overrides=dict(model.kv_overrides),
            repack=model.repack,
            header_only=model.dry_run,
            placement=self.placement_params(),
            devices=self.device_params(),
        )

    def placement_params(self) -> PlacementParams:
        """Where tensors, layers and the cache go."""
        from ikpy.graph.placement import PlacementParams

        model = self.model
        return PlacementParams(
            n_gpu_layers=model.n_gpu_layers,
            split_mode=model.split_mode,
            main_gpu=model.main_gpu,
            tensor_split=model.tensor_split,
            rules=tuple(model.tensor_overrides),
            n_cpu_moe=model.n_cpu_moe,
            kv_offload=model.kv_offload,
        )

    def device_params(self) -> DeviceParams:
        """How devices are used."""
        from ikpy.graph.offload_policy import offload_policy
        from ikpy.graph.placement import DeviceParams

        model = self.model
        return DeviceParams(
            names=model.devices,
            policy=offload_policy(model.offload_policy),
            offload_batch=model.cuda_params.get("offload-batch-size", 32),
            bf16_batch=model.cuda_params.get("bf16-batch-size"),
            wgmma=bool(model.cuda_params.get("wgmma", 1)),
            only_active_experts=model.only_active_experts,
            graphs=bool(model.cuda_params.get("graphs", 1)),
            check=self.context.warmup,
        )

    def context_params(self, **changes: Any) -> ContextParams:
        """Context parameters of the engine, which have the values of fields of the same name; `changes` replaces single
        ones (n_ctx=..., n_seq_max=...)."""
        from ikpy.engine.params import ContextParams

        context = self.context
        shared = {each.name for each in fields(ContextParams)} & vars(context).keys()
        values: dict[str, Any] = {name: getattr(context, name) for name in shared}
        values["n_seq_max"] = context.n_parallel
        values["n_threads"], values["n_threads_batch"] = self.n_threads, self.n_threads_batch
        if context.attention is not None:
            values["causal"] = context.attention == "causal"
        return ContextParams(**(values | changes))
