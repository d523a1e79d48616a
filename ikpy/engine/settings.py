"""From the parameters of a context to what its graphs are built with: sizes, cache types, RoPE, window cells."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ikpy.engine.media import MediaStore
from ikpy.engine.model import Model
from ikpy.engine.params import PLAIN_CACHE_TYPES, ContextParams
from ikpy.errors import UsageError
from ikpy.models.batch import EVERY, SYMMETRIC, GraphParams, Window
from ikpy.models.hparams import HParams
from ikpy.models.rope import RopeParams
from ikpy.quants import registry


@dataclass(frozen=True)
class Sizes:
    """Tokens of the context, of a batch and of a micro-batch; the attended length is a multiple of ``pad`` cells."""

    n_ctx: int
    n_batch: int
    n_ubatch: int
    pad: int

    @classmethod
    def of(cls, params: ContextParams, hp: HParams) -> Sizes:
        """Sizes that a context really has. Raises UsageError if neither the parameters nor the file give a length."""
        pad = params.cell_multiple
        n_ctx = padded(params.n_ctx or hp.n_ctx_train, pad)
        if n_ctx == 0:
            raise UsageError(f"the file's context length ({hp.arch}.context_length) is 0: give one (-c)")
        n_batch = max(16, min(n_ctx, params.n_batch))
        n_ubatch = min(n_batch, params.n_ubatch or params.n_batch)
        return cls(n_ctx, n_batch, n_ubatch, pad)


def padded(n: int, pad: int) -> int:
    """n rounded up to a multiple of pad."""
    return -(-n // pad) * pad


def window_cells(model: Model, params: ContextParams, sizes: Sizes) -> dict[Window, int]:
    """Number of cells for each window of the model that needs fewer than n_ctx, and for compressed stretches.

    A micro-batch is stored before it is attended to: its tokens come on top of the window of every sequence.
    """
    layers = range(model.hparams.n_layer)
    windows = set() if params.swa_full else {window for il in layers for window in model.arch.windows(il)}
    # Texts whose tokens see later ones are a micro-batch each: no cell can be given up.
    sizes_of = [window for window in windows if window[1] > 0 and window[0] != SYMMETRIC]
    wanted = {w: padded(w[1] * params.n_seq_max + sizes.n_ubatch, sizes.pad) for w in sizes_of}
    found = {window: n for window, n in wanted.items() if n < sizes.n_ctx}
    stretches = sorted({model.arch.stretch(il) for il in layers} - {0})
    return found | {(EVERY, n): padded(sizes.n_ctx // n, sizes.pad) or sizes.pad for n in stretches}


def graph_params(
    model: Model, params: ContextParams, n_ctx: int, windows: frozenset[Window], log: Callable[[str], None]
) -> GraphParams:
    """What the graphs of a context are built with; options without an effect are logged.

    Raises UsageError for cache types and modes that are not possible.
    """
    p, hp = params, model.hparams
    mla = model.arch.effective_mla(model.params.mla if p.mla is None else p.mla)
    if mla not in (0, 1, 2, 3):
        raise UsageError(f"-mla {mla}: possible values are 0, 1, 2 and 3")
    types_k = _layer_types(p.type_k, p.type_k_first, p.type_k_last, hp.n_layer)
    types_v = _layer_types(p.type_v, p.type_v_first, p.type_v_last, hp.n_layer)
    heads = [model.arch.head_sizes(il) for il in range(hp.n_layer)]
    for option, reason in idle_options(model, p, mla):
        log(f"warning: {option} has no effect: {reason}")
    return GraphParams(
        n_ctx=n_ctx,
        flash_attn=p.flash_attn,
        mla=mla,
        attn_max_batch=p.attn_max_batch,
        types_k=tuple(
            _cache_type(name, 0 if mla else sizes.k, "-ctk") for name, sizes in zip(types_k, heads, strict=True)
        ),
        types_v=tuple(
            _cache_type(name, 0 if mla else sizes.v, "-ctv") for name, sizes in zip(types_v, heads, strict=True)
        ),
        rope=_rope_params(p, hp),
        expert_reduction=p.smart_expert_reduction,
        causal=p.causal and hp.causal,
        n_seq_max=p.n_seq_max,
        grouped_experts=p.grouped_experts,
        k_hadamard=_hadamard(p.k_hadamard, types_k, "-khad", log),
        v_hadamard=not mla and not model.arch.values_are_keys and _hadamard(p.v_hadamard, types_v, "-vhad", log),
        windows=windows,
        sparse_top_k=p.sparse_top_k,
        type_indexer=_cache_type(p.type_indexer, 0, "-ictk"),
        on_devices=model.devices is not None and model.devices.has_gpus,
        rope_sections=model.arch.rope_sections if p.media else None,
        one_way=frozenset(w for w in _windows(model) if not model.arch.rows_see_each_other(w)),
    )


def idle_options(model: Model, p: ContextParams, mla: int) -> Iterator[tuple[str, str]]:
    """Options of a context that change nothing for this model, each with the reason."""
    yield from _idle_expert_options(model, p)
    yield from _idle_window_options(model, p)
    yield from _idle_cache_options(model, p, mla)
    yield from _idle_rope_options(model, p)


def _idle_expert_options(model: Model, p: ContextParams) -> Iterator[tuple[str, str]]:
    hp = model.hparams
    kept, threshold = p.smart_expert_reduction
    if threshold > 0 and not hp.n_expert and kept >= 0:
        yield "-ser", "the model has no experts"
    elif threshold > 0 and kept >= hp.n_expert_used > 0:
        yield "-ser", f"the model uses {hp.n_expert_used} experts for a token"
    if p.grouped_experts and (not hp.n_expert or hp.routing.groups == (1, 1)):
        yield "-ger", "the model has no groups of experts"
    elif p.grouped_experts and hp.routing.limited:
        yield "-ger", "the model's routing is limited to the best groups in any case"


def _idle_window_options(model: Model, p: ContextParams) -> Iterator[tuple[str, str]]:
    windows = _windows(model)
    if p.swa_full and not any(size > 0 for _, size in windows):
        yield "--swa-full", "the model attends to all tokens in every layer"
    elif p.swa_full and all(kind == SYMMETRIC for kind, size in windows if size > 0):
        yield "--swa-full", "layers with windows to both sides keep all tokens in any case"


def _idle_cache_options(model: Model, p: ContextParams, mla: int) -> Iterator[tuple[str, str]]:
    if not any(model.hparams.n_head_kv) and any(name.lower() != "f16" for name in (p.type_k, p.type_v)):
        yield "-ctk and -ctv", "no layer of the model has a cache"
    held = "latents" if mla else "keys that are the values" if model.arch.values_are_keys else ""
    if held and p.v_hadamard:
        yield "-vhad", f"the cache holds {held}"
    if held and p.type_v.lower() != "f16":
        yield "-ctv", f"the cache holds {held}, whose type is that of -ctk"
    if not model.arch.has_indexers:
        if p.sparse_top_k > 0:
            yield "-dsatk", "the model has no indexers"
        if p.type_indexer.lower() != "f16":
            yield "-ictk", "the model has no indexers"


def _idle_rope_options(model: Model, p: ContextParams) -> Iterator[tuple[str, str]]:
    hp = model.hparams
    scaling = p.rope_scaling or hp.rope_scaling_type
    rotated = [il for il in range(hp.n_layer) if model.arch.is_rotated(il)]
    if not rotated:
        if _sets_rope(p):
            yield "--rope-... and --yarn-...", "no layer of the model is rotated"
        return
    windows_only = model.arch.window_rope_of_file and all(model.arch.window(il)[0] != "none" for il in rotated)
    if windows_only and (p.rope_freq_scale or (scaling == "none" and hp.rope_freq_scale != 1)):
        scale = f"{hp.rope_freq_scale:g}"
        yield "--rope-scale", f"layers with a window use the scale of the file, {scale}, others know no positions"
    elif scaling == "none" and p.rope_freq_scale:
        yield "--rope-scale", "--rope-scaling is none"
    is_yarn = p.yarn_ext_factor > 0 or (p.yarn_ext_factor < 0 and scaling == "yarn")
    if not is_yarn and (p.yarn_orig_ctx or p.yarn_beta_fast >= 0 or p.yarn_beta_slow >= 0):
        yield "--yarn-...", f"--rope-scaling is {scaling}, not yarn"


def media_width(model: Model, media: MediaStore | None) -> int:
    """Elements of a picture's row as the model reads it; 0 without a store. UsageError if it reads none."""
    hp, arch = model.hparams, model.arch
    if media is None or arch.decoder_start is not None:
        return 0
    if arch.is_encoder:
        raise UsageError(f"{hp.arch} models read tokens only, no pictures and sounds")
    if arch.reads_grids and arch.rope_sections is None:
        raise UsageError(f"the file does not say how pictures are rotated ({hp.arch}.rope.dimension_sections)")
    if arch.rope_sections is not None and arch.rope_sections.lengths[3] and not arch.counts_pictures:
        raise UsageError(
            f"{hp.arch}.rope.dimension_sections {list(arch.rope_sections.lengths)}: a fourth section, of pairs that "
            "only text would rotate, is not supported"
        )
    if media.n_vocab != hp.n_vocab:
        raise UsageError(f"ids of pictures begin at {media.n_vocab} and the model has {hp.n_vocab} tokens")
    return hp.n_embd * (1 + arch.n_deep)


def turns_positions(model: Model, params: GraphParams) -> bool:
    """Whether rotation positions may differ from positions, behind pictures or behind a text for the encoder."""
    arch = model.arch
    return (params.rope_sections is not None and not arch.counts_pictures) or arch.decoder_start is not None


def _windows(model: Model) -> set[Window]:
    """Windows of all layers."""
    return {window for il in range(model.hparams.n_layer) for window in model.arch.windows(il)}


def _layer_types(name: str, first: tuple[str, int] | None, last: tuple[str, int] | None, n_layer: int) -> list[str]:
    """Cache type of every layer; where both apply, that of the last layers counts."""
    types = [name] * n_layer
    for edge, layers in ((first, range(n_layer)), (last, range(n_layer)[::-1])):
        if edge is not None:
            for layer in layers[: max(edge[1], 0)]:
                types[layer] = edge[0]
    return types


def _cache_type(name: str, head_size: int, option: str) -> int:
    """Id of a cache type that rows of this size can have; 0 for latents, which the architecture checks."""
    kind = registry.cache_type(name)
    if kind is None:
        raise UsageError(f"{option} {name}: unsupported cache type; possible: {', '.join(registry.CACHE_TYPES)}")
    if head_size % kind.block_elements:
        raise UsageError(
            f"{option} {name}: the head size {head_size} is no multiple of the block size {kind.block_elements}"
        )
    return kind.id


def _hadamard(wanted: bool, cache_types: Sequence[str], option: str, log: Callable[[str], None]) -> bool:
    if wanted and all(name.lower() in PLAIN_CACHE_TYPES for name in cache_types):
        names = "/".join(dict.fromkeys(cache_types))
        log(f"warning: {option} has no effect on a cache of type {names}: it serves quantized ones")
        return False
    return wanted


def _sets_rope(p: ContextParams) -> bool:
    """Whether the user asks for RoPE parameters other than those of the file."""
    yarn = p.yarn_ext_factor, p.yarn_attn_factor, p.yarn_beta_fast, p.yarn_beta_slow
    return bool(p.rope_freq_base or p.rope_freq_scale or p.rope_scaling or p.yarn_orig_ctx) or max(yarn) >= 0


def _rope_params(p: ContextParams, hp: HParams) -> RopeParams:
    """Run-time RoPE parameters: the user's value wins."""
    scaling = p.rope_scaling or hp.rope_scaling_type
    ext = p.yarn_ext_factor if p.yarn_ext_factor >= 0 else (1.0 if scaling == "yarn" else 0.0)
    rope = RopeParams(
        freq_base=p.rope_freq_base or hp.rope_freq_base,
        freq_scale=1.0 if scaling == "none" else (p.rope_freq_scale or hp.rope_freq_scale),
        n_ctx_orig=p.yarn_orig_ctx or hp.n_ctx_orig or hp.n_ctx_train,
        ext_factor=ext,
        attn_factor=(p.yarn_attn_factor if p.yarn_attn_factor >= 0 else hp.yarn_attn_factor) * hp.rope_attn_factor,
        beta_fast=p.yarn_beta_fast if p.yarn_beta_fast >= 0 else hp.yarn_beta_fast,
        beta_slow=p.yarn_beta_slow if p.yarn_beta_slow >= 0 else hp.yarn_beta_slow,
    )
    rope.check()
    return rope
