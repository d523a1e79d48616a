"""Parameters of the common tools, filled by the parser and handed to the engine.

Every default of a shared flag is declared here and nowhere else; the option table refers to a field by its dotted
path ("context.n_ctx"). Sampling fields carry the names of the request fields of the completion API.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ikpy.engine.params import ContextParams, ModelParams

RANDOM_SEED = 0xFFFFFFFF
"""Seed marker: choose a seed at start."""

DEFAULT_SAMPLERS = (
    "dry",
    "top_k",
    "tfs_z",
    "typical_p",
    "top_p",
    "min_p",
    "xtc",
    "top_n_sigma",
    "temperature",
    "adaptive_p",
)


@dataclass
class ModelOptions:
    """Which file is loaded and how its tensors are placed."""

    path: str | None = None
    url: str | None = None
    hf_repo: str | None = None
    hf_file: str | None = None
    hf_token: str | None = None
    alias: str | None = None
    check_tensors: bool = False
    dry_run: bool = False
    kv_overrides: list[tuple[str, object]] = field(default_factory=list)
    tensor_overrides: list[tuple[str, str]] = field(default_factory=list)
    n_gpu_layers: int = -1
    split_mode: str = "layer"
    n_cpu_moe: int = 0
    fit: bool = False


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
    warmup: bool = True


@dataclass
class SamplingOptions:
    """Sampler chain and its values."""

    seed: int = RANDOM_SEED
    samplers: tuple[str, ...] = DEFAULT_SAMPLERS
    temperature: float = 0.8
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    tfs_z: float = 1.0
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 1.0
    repeat_last_n: int = 64
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalize_nl: bool = False
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: list[str] = field(default_factory=lambda: ["\n", ":", '"', "*"])
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    adaptive_target: float = -1.0
    adaptive_decay: float = 0.9
    adaptive_updt_w_cur: bool = False
    ignore_eos: bool = False
    logit_bias: list[tuple[int, float]] = field(default_factory=list)
    grammar: str = ""
    json_schema: str | None = None


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
    interactive: bool = False
    interactive_first: bool = False
    multiline_input: bool = False
    color: bool = False
    special: bool = False
    display_prompt: bool = True
    verbose_prompt: bool = False
    simple_io: bool = False
    in_prefix: str = ""
    in_suffix: str = ""
    in_prefix_bos: bool = False
    reverse_prompts: list[str] = field(default_factory=list)
    prompt_cache: str | None = None
    prompt_cache_all: bool = False
    prompt_cache_ro: bool = False
    print_token_count: int = -1
    chat_template: str | None = None
    chat_template_file: str | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class LogOptions:
    """Amount and place of log output."""

    verbosity: int = 0
    minilog: bool = False
    disable: bool = False
    directory: str | None = None


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
class ImatrixOptions:
    """Output of the importance matrix tool."""

    output: str = "imatrix.dat"
    output_format: str = "auto"
    output_draft: str | None = None
    output_frequency: int = 10
    save_frequency: int = 0
    process_output: bool = False
    output_tensor_name: str = "output.weight"
    compute_ppl: bool = True
    from_chunk: int = 0
    layer_similarity: bool = False
    show_statistics: bool = False


@dataclass
class ServerOptions:
    """HTTP side of the server."""

    host: str = "127.0.0.1"
    port: int = 8080
    path: str | None = None
    webui: str = "auto"
    api_keys: list[str] = field(default_factory=list)
    ssl_key_file: str | None = None
    ssl_cert_file: str | None = None
    timeout: int = 600
    log_format: str = "text"
    metrics: bool = False
    slots: bool = True
    slot_save_path: str | None = None
    slot_prompt_similarity: float = 0.1
    cont_batching: bool = True
    queue_limit: int = 512
    context_shift: bool = True
    reasoning_format: str = "deepseek"
    reasoning: str = "auto"
    skip_chat_parsing: bool = False
    prefill_assistant: bool = True
    parallel_tool_calls: bool = False


@dataclass
class CommonParams:
    """Everything a common tool is started with.

    `tool` is the subcommand; `given` lists the options of the command line by their first spelling, in order, so that
    a tool can tell a default from the same value given by the user. `action` is run, help or version.
    """

    tool: str = "cli"
    model: ModelOptions = field(default_factory=ModelOptions)
    context: ContextOptions = field(default_factory=ContextOptions)
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    prompt: PromptOptions = field(default_factory=PromptOptions)
    log: LogOptions = field(default_factory=LogOptions)
    perplexity: PerplexityOptions = field(default_factory=PerplexityOptions)
    sweep: SweepOptions = field(default_factory=SweepOptions)
    imatrix: ImatrixOptions = field(default_factory=ImatrixOptions)
    server: ServerOptions = field(default_factory=ServerOptions)
    given: list[str] = field(default_factory=list)
    action: str = "run"
    warnings: list[str] = field(default_factory=list)

    @property
    def n_threads(self) -> int:
        """Generation threads; physical cores unless given."""
        from ikpy.threads import physical_cores

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
            check_tensors=model.check_tensors,
            kv_overrides=dict(model.kv_overrides),
        )

    def context_params(self, **changes: Any) -> ContextParams:
        """Context parameters of the engine; `changes` replaces single fields (n_ctx=..., n_seq_max=...)."""
        from ikpy.engine.params import ContextParams

        context = self.context
        values: dict[str, Any] = {
            "n_ctx": context.n_ctx,
            "n_batch": context.n_batch,
            "n_ubatch": context.n_ubatch,
            "n_seq_max": context.n_parallel,
            "n_threads": self.n_threads,
            "n_threads_batch": self.n_threads_batch,
            "flash_attn": context.flash_attn,
            "mla": context.mla,
            "attn_max_batch": context.attn_max_batch,
            "type_k": context.type_k,
            "type_v": context.type_v,
            "rope_freq_base": context.rope_freq_base,
            "rope_freq_scale": context.rope_freq_scale,
            "rope_scaling": context.rope_scaling,
            "yarn_ext_factor": context.yarn_ext_factor,
            "yarn_attn_factor": context.yarn_attn_factor,
            "yarn_beta_fast": context.yarn_beta_fast,
            "yarn_beta_slow": context.yarn_beta_slow,
            "yarn_orig_ctx": context.yarn_orig_ctx,
            "smart_expert_reduction": context.smart_expert_reduction,
            "grouped_experts": context.grouped_experts,
            "embeddings": context.embeddings,
        }
        if context.attention is not None:
            values["causal"] = context.attention == "causal"
        return ContextParams(**(values | changes))
