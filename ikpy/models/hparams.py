"""Hyper-parameters shared by all architectures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ikpy.errors import FileFormatError
from ikpy.models.keys import MAX_LAYERS, Keys
from ikpy.models.rope import MOST_MAGNITUDE, possible
from ikpy.models.routing import Routing

MAX_EXPERTS = 1024
POOLINGS = ("none", "mean", "cls", "last", "rank")
"""What the numbers of the key pooling_type mean."""
ROPE_SCALING_TYPES = ("none", "linear", "yarn")
LONG_ROPE = "longrope"
"""Frequency factors of their own: the type changes nothing else."""


@dataclass(frozen=True)
class HeadSizes:
    """Elements of a key head and of a value head, and how many of the key's are rotated."""

    k: int
    v: int
    rotated: int


@dataclass
class HParams:
    """Values of a loaded model; lists have one entry per layer. extra holds what one architecture adds.

    n_embd_head_k, n_embd_head_v and n_rot are those of layers that attend to everything; window_heads those of window
    layers. window_freq_base is the RoPE base of window layers where the file gives one.
    """

    arch: str
    name: str
    n_layer: int
    n_vocab: int
    n_ctx_train: int
    n_embd: int
    n_ff: list[int]
    n_head: list[int]
    n_head_kv: list[int]
    n_embd_head_k: int
    n_embd_head_v: int
    n_rot: int
    norm_eps: float
    rope_freq_base: float
    rope_freq_scale: float
    rope_scaling_type: str
    n_ctx_orig: int
    rope_attn_factor: float
    window_heads: HeadSizes
    window_freq_base: float | None
    n_expert: int
    n_expert_used: int
    routing: Routing
    n_ff_exp: int = 0
    n_ff_shared: int = 0
    n_dense_layers: int = 0
    n_swa: int = 0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    attn_softcap: float = 0.0
    qkv_clamp: float = 0.0
    max_alibi_bias: float = 0.0  # of linear biases of attention, 0: none
    final_softcap: float = 0.0
    yarn_log_multiplier: float = 0.0
    yarn_attn_factor: float = 1.0
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    causal: bool = True
    pooling: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)


def block_count(keys: Keys) -> int:
    """Layers that the file counts; FileFormatError for an impossible number."""
    n = int(keys.u32("block_count"))
    if not 0 < n <= MAX_LAYERS:
        raise FileFormatError(f"{keys.gguf.path}: {keys.arch}.block_count is {n}; 1 to {MAX_LAYERS} are possible")
    return n


def read_hparams(
    keys: Keys,
    *,
    layer_norm: bool = False,
    may_lack_heads: bool = False,
    may_lack_rope: bool = False,
    has_rope: bool = True,
    long_rope: bool = False,
    epsilon_key: str = "",
) -> HParams:
    """Reads and checks the common keys. layer_norm picks the LayerNorm epsilon key instead of the RMS one, unless
    epsilon_key names one; may_lack_heads: some layers may have no KV heads; may_lack_rope: heads may have no part for
    RoPE; has_rope: whether those of the architecture ever do; long_rope: the architecture has factors of LongRoPE.

    Routing is set to the most common form: softmax over all experts, the chosen weights renormalised.
    """
    n_layer = block_count(keys)
    n_embd = keys.u32("embedding_length")
    n_head = keys.per_layer("attention.head_count", n_layer, 0)
    head_default = n_embd // n_head[0] if n_head[0] else 0
    n_embd_head_k = keys.u32("attention.key_length", head_default)
    n_embd_head_v = keys.u32("attention.value_length", head_default)
    n_rot = keys.u32("rope.dimension_count", n_embd_head_k) if has_rope else 0
    window_head_k = keys.u32("attention.key_length_swa", n_embd_head_k)
    scaling = keys.string("rope.scaling.type", "linear")
    if scaling == LONG_ROPE and long_rope:
        scaling = "none"
    if scaling not in ROPE_SCALING_TYPES:
        raise FileFormatError(f"{keys.gguf.path}: unknown RoPE scaling type '{scaling}'")
    factor = keys.f32("rope.scaling.factor", None)
    if factor is None:
        factor = keys.f32("rope.scale_linear", 0.0)
    n_ctx_train = keys.u32("context_length")
    hp = HParams(
        arch=keys.arch,
        name=str(keys.gguf.get("general.name", "n/a")),
        n_layer=n_layer,
        n_vocab=_vocab_size(keys),
        n_ctx_train=n_ctx_train,
        n_embd=n_embd,
        n_ff=keys.per_layer("feed_forward_length", n_layer, 0),
        n_head=n_head,
        n_head_kv=n_head,
        n_embd_head_k=n_embd_head_k,
        n_embd_head_v=n_embd_head_v,
        n_rot=n_rot,
        norm_eps=keys.f32(epsilon_key or f"attention.layer_norm_{'' if layer_norm else 'rms_'}epsilon"),
        rope_freq_base=keys.f32("rope.freq_base", 10000.0),
        rope_freq_scale=1.0 / factor if factor else 1.0,
        rope_scaling_type=scaling,
        n_ctx_orig=keys.u32("rope.scaling.original_context_length", n_ctx_train),
        rope_attn_factor=keys.f32("rope.scaling.attn_factor", 1.0),
        window_heads=HeadSizes(
            window_head_k,
            keys.u32("attention.value_length_swa", n_embd_head_v),
            keys.u32("rope.dimension_count_swa", min(n_rot, window_head_k)),
        ),
        window_freq_base=keys.f32("rope.freq_base_swa", None),
        n_expert=keys.u32("expert_count", 0),
        n_expert_used=keys.u32("expert_used_count", 0),
        routing=Routing(keys.u32("expert_used_count", 0), "softmax", normalize=True),
        causal=keys.boolean("attention.causal", True),
        pooling=_pooling(keys),
    )
    if keys.has("attention.head_count_kv"):
        hp.n_head_kv = keys.per_layer("attention.head_count_kv", n_layer)
    _check(keys, hp, may_lack_heads, 0 if may_lack_rope or not has_rope else 2)
    return hp


def check_experts(keys: Keys, hp: HParams) -> None:
    """FileFormatError for a model whose layers have experts and whose file counts none."""
    if not hp.n_expert:
        raise FileFormatError(f"{keys.gguf.path}: {keys.arch}.expert_count is 0")


def check_rope_base(keys: Keys, hp: HParams, base: float) -> None:
    """FileFormatError for a base or the file's scale without angles."""
    if not (possible(base) and possible(hp.rope_freq_scale)):
        where = keys.gguf.path
        raise FileFormatError(f"{where}: impossible RoPE parameters: base {base:g}, scale {hp.rope_freq_scale:g}")


def check_any_heads(keys: Keys, hp: HParams) -> None:
    """For models that are nothing without attention, some of whose layers may lack it. Raises FileFormatError."""
    if not any(hp.n_head):
        raise FileFormatError(f"{keys.gguf.path}: {keys.arch}.attention.head_count is 0")


def _pooling(keys: Keys) -> str | None:
    number = keys.u32("pooling_type", None)
    if number is None:
        return None
    if number >= len(POOLINGS):
        raise FileFormatError(f"{keys.gguf.path}: unknown {keys.arch}.pooling_type {number}")
    return POOLINGS[number]


def _vocab_size(keys: Keys) -> int:
    tokens = keys.gguf.get("tokenizer.ggml.tokens")
    size = keys.u32("vocab_size", None)
    if size is None:
        if tokens is None:
            raise FileFormatError(f"{keys.gguf.path}: cannot find tokenizer vocab in model file")
        return len(tokens)
    if tokens is not None and len(tokens) != size:
        raise FileFormatError(
            f"{keys.gguf.path}: vocab size mismatch: {keys.arch}.vocab_size is {size}, "
            f"tokenizer.ggml.tokens has {len(tokens)} entries"
        )
    return int(size)


def _check(keys: Keys, hp: HParams, may_lack_heads: bool, least_rotated: int) -> None:
    where = keys.gguf.path
    if hp.n_expert > MAX_EXPERTS or hp.n_expert_used > hp.n_expert:
        raise FileFormatError(
            f"{where}: {hp.n_expert_used} of {hp.n_expert} experts used; at most {MAX_EXPERTS} experts are possible"
        )
    if hp.n_expert > 0 and hp.n_expert_used == 0:
        raise FileFormatError(f"{where}: model has expert layers but no expert layers are used")
    for il, (heads, kv) in enumerate(zip(hp.n_head, hp.n_head_kv, strict=True)):
        is_idle = may_lack_heads and kv == 0
        if not is_idle and (heads <= 0 or kv <= 0 or heads % kv):
            raise FileFormatError(f"{where}: layer {il} has {heads} heads and {kv} KV heads")
    full = HeadSizes(hp.n_embd_head_k, hp.n_embd_head_v, hp.n_rot)
    if not 0 <= hp.norm_eps <= 1:
        side = "below 0" if hp.norm_eps < 0 else "above 1"
        raise FileFormatError(f"{where}: the epsilon of norms is {hp.norm_eps:g}, {side}")
    if hp.n_embd <= 0:
        raise FileFormatError(f"{where}: impossible dimensions: embedding {hp.n_embd}")
    for suffix, sizes in (("", full), ("_swa", hp.window_heads)):
        if any(hp.n_head_kv):
            _check_heads(where, sizes, suffix, least_rotated)
    check_rope_base(keys, hp, hp.rope_freq_base)
    if hp.window_freq_base is not None:
        check_rope_base(keys, hp, hp.window_freq_base)
    if not abs(hp.rope_attn_factor) <= MOST_MAGNITUDE:
        raise FileFormatError(f"{where}: {keys.arch}.rope.scaling.attn_factor is {hp.rope_attn_factor:g}")


def _check_heads(where: str, sizes: HeadSizes, suffix: str, least_rotated: int) -> None:
    if sizes.k <= 0 or sizes.v <= 0 or sizes.rotated < least_rotated or sizes.rotated % 2:
        rope = f", rope{suffix} {sizes.rotated}" if sizes.rotated or least_rotated else ""
        raise FileFormatError(f"{where}: impossible dimensions: head{suffix} {sizes.k}/{sizes.v}{rope}")
    if sizes.rotated > sizes.k:
        raise FileFormatError(
            f"{where}: rope.dimension_count{suffix} {sizes.rotated} is above the key head size{suffix} {sizes.k}"
        )
