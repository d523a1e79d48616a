"""Log lines of loading a model, in the wording that scripts and people know.

Every function is pure: it takes an open GGUF file, a vocabulary or plain numbers and returns lines without line ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from ikpy.errors import escaped
from ikpy.gguf.metadata import integers_or, scalar_or
from ikpy.gguf.reader import GGUFFile
from ikpy.gguf.types import type_label
from ikpy.models.keys import MAX_LAYERS
from ikpy.models.size_class import size_class
from ikpy.quants import registry
from ikpy.vocab import Vocab

T = TypeVar("T")
MIB = 1 << 20
GIB = 1 << 30
VALUE_WIDTH = 40
META = "llm_load_print_meta: "
NOT_REPEATING = ("token_embd.weight", "output.weight")
VOCAB_KINDS = {
    "spm": "SPM",
    "bpe": "BPE",
    "wpm": "WPM",
    "ugm": "UGM",
    "plamo": "PLaMo2",
    "rwkv": "RWKV",
    "none": "no vocab",
}
SPECIAL_TOKENS = (
    ("bos", "BOS"),
    ("eos", "EOS"),
    ("eot", "EOT"),
    ("eom", "EOM"),
    ("unk", "UNK"),
    ("sep", "SEP"),
    ("pad", "PAD"),
    ("mask", "MASK"),
    ("nl", "LF"),
    ("fim_pre", "FIM PRE"),
    ("fim_suf", "FIM SUF"),
    ("fim_mid", "FIM MID"),
    ("fim_pad", "FIM PAD"),
    ("fim_rep", "FIM REP"),
    ("fim_sep", "FIM SEP"),
)
GATING = {0: "softmax", 1: "softmax", 2: "sigmoid", 3: "weight"}


# -- loader ------------------------------------------------------------------------------------------------


def huge_page_line(file: GGUFFile) -> str:
    """What pages -thp found for a file that was read into memory."""
    from ikpy.gguf.huge_pages import transparent_page_size

    sizes = {shard.page_size for shard in file.shards}
    if 0 not in sizes:
        return f"llama_model_loader: using reserved huge pages of {min(sizes) >> 20} MiB"
    if size := transparent_page_size():
        return f"llama_model_loader: using THP with page size {size >> 20} MiB"
    return "llama_model_loader: no huge pages: too few are reserved and transparent ones are disabled in this kernel"


def loader_lines(file: GGUFFile, path: str, *, dump: bool = True) -> list[str]:
    """Number of keys and tensors, every metadata value (unless `dump` is False), and tensors per type."""
    prefix = "llama_model_loader: "
    lines = []
    if len(file.shards) > 1:
        lines.append(f"{prefix}additional {len(file.shards) - 1} GGUFs metadata loaded.")
    lines.append(
        f"{prefix}loaded meta data with {len(file.metadata)} key-value pairs and {len(file.tensors)} tensors "
        f"from {path} (version {version_text(file.version)})"
    )
    if dump:
        lines.append(f"{prefix}Dumping metadata keys/values. Note: KV overrides do not apply in this output.")
        for index, key in enumerate(file.metadata):
            value = file.metadata[key]
            kind = type_label(file.value_type(key), file.element_type(key))
            if file.element_type(key) is not None:
                kind = f"{kind[:-1]},{len(value)}]"
            lines.append(f"{prefix}- kv {index:3}: {escaped(key):>42} {kind:<16} = {value_text(value)}")
    counts: dict[int, int] = {}
    for tensor in file.tensors.values():
        counts[tensor.type_id] = counts.get(tensor.type_id, 0) + 1
    for type_id, count in sorted(counts.items()):
        lines.append(f"{prefix}- type {registry.by_id(type_id).name:>4}: {count:4} tensors")
    return lines


def version_text(version: int) -> str:
    """`GGUF V3 (latest)`."""
    return f"GGUF V{version}" + (" (latest)" if version == 3 else "")


def value_text(value: Any) -> str:
    """A metadata value on one line, cut to 40 bytes."""
    if isinstance(value, (str, bool, int, float)):
        text = scalar_text(value)
    else:
        # A few elements fill the line; the others are not formatted.
        items = [value[i] for i in range(min(len(value), VALUE_WIDTH))]
        text = "[" + ", ".join(item_text(item) for item in items) + "]"
    encoded = escaped(text).encode("utf-8", "surrogateescape")
    if len(encoded) > VALUE_WIDTH:
        encoded = encoded[: VALUE_WIDTH - 3] + b"..."
    return encoded.decode("utf-8", "replace")


def scalar_text(value: Any) -> str:
    """Number with 6 decimals if it is a float, true/false, or the text itself."""
    if isinstance(value, (bool, np.bool_)):
        return "true" if value else "false"
    if isinstance(value, (float, np.floating)):
        return f"{value:.6f}"
    return str(value)


def item_text(value: Any) -> str:
    """An array element; strings are quoted."""
    if isinstance(value, str):
        quoted = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{quoted}"'
    return scalar_text(value)


def override_line(key: str, value: object) -> str:
    """Note that a metadata value given by the user is in force."""
    kind = {bool: "bool", int: "int", float: "float", str: "str"}[type(value)]
    return f"validate_override: Using metadata override ({kind:>5}) '{key}' = {scalar_text(value)}"


# -- model -------------------------------------------------------------------------------------------------


def meta_lines(file: GGUFFile, *, rope_type: int = 0) -> list[str]:
    """Summary of the hyper-parameters, size and name of a model.

    Args:
        rope_type: 0 for adjacent pairs, 2 for half-split pairs, -1 for a model without RoPE.
    """
    arch = str(file.get("general.architecture", "?"))
    get = _Keys(file, arch)
    fields = [
        ("format", version_text(file.version)),
        ("arch", arch),
        *_dimension_fields(get),
        *_rope_fields(get, rope_type),
        *((name, str(get(f"ssm.{key}", 0))) for name, key in SSM_KEYS),
        *_size_fields(file),
        ("general.name", str(file.get("general.name", "n/a"))),
    ]
    lines = [f"{META}{name:<16} = {text}" for name, text in fields]
    if arch in MLA_ARCHITECTURES:
        lines += [f"{META}{name:<20} = {text}" for name, text in _latent_fields(get)]
    elif get("expert_feed_forward_length", 0):
        lines.append(f"{META}{'n_ff_exp':<16} = {get('expert_feed_forward_length', 0)}")
    return lines


MLA_ARCHITECTURES = (
    "bailingmoe3",
    "deepseek2",
    "deepseek32",
    "dots3note",
    "glm-dsa",
    "glm5-next",
    "hy_v4",
    "kimi-k3",
    "kimi-linear",
    "minicpm3",
    "mistral4",
    "plm",
)
SSM_KEYS = (
    ("ssm_d_conv", "conv_kernel"),
    ("ssm_d_inner", "inner_size"),
    ("ssm_d_state", "state_size"),
    ("ssm_dt_rank", "time_step_rank"),
    ("ssm_n_group", "group_count"),
)


class _Keys:
    """Values below `ARCH.` with defaults."""

    def __init__(self, file: GGUFFile, arch: str) -> None:
        self.file = file
        self.arch = arch
        self.n_layer = self("block_count", 0)

    def __call__(self, key: str, default: T) -> T:
        return scalar_or(self.file.metadata, f"{self.arch}.{key}", default)

    def per_layer(self, key: str, default: int = 0) -> list[int]:
        """One value per layer; a scalar counts for all."""
        values = integers_or(self.file.metadata, f"{self.arch}.{key}", default)
        return values * min(max(self.n_layer, 1), MAX_LAYERS) if len(values) == 1 else values


def layers_text(values: list[int]) -> str:
    """One number if all layers agree, else a list."""
    return str(values[0]) if len(set(values)) == 1 else f"[{', '.join(map(str, values))}]"


def _dimension_fields(get: _Keys) -> Iterable[tuple[str, str]]:
    n_embd = get("embedding_length", 0)
    heads = get.per_layer("attention.head_count")
    kv_key = "attention.head_count_kv"
    kv_heads = get.per_layer(kv_key) if f"{get.arch}.{kv_key}" in get.file.metadata else heads
    head_default = n_embd // heads[0] if heads[0] else 0
    head_k = get("attention.key_length", head_default)
    head_v = get("attention.value_length", head_default)
    window = get("attention.sliding_window", 0)
    gqa = [h // kv if kv else 0 for h, kv in zip(heads, kv_heads, strict=False)]
    yield "n_ctx_train", str(get("context_length", 0))
    yield "n_embd", str(n_embd)
    yield "n_layer", str(get.n_layer)
    yield "n_head", layers_text(heads)
    yield "n_head_kv", layers_text(kv_heads)
    yield "n_rot", str(get("rope.dimension_count", head_k))
    yield "n_swa", str(window)
    yield "n_swa_pattern", "1"
    yield "n_embd_head_k", str(head_k)
    yield "n_embd_head_v", str(head_v)
    yield "n_gqa", layers_text(gqa)
    yield "n_embd_k_gqa", layers_text([head_k * kv for kv in kv_heads])
    yield "n_embd_v_gqa", layers_text([head_v * kv for kv in kv_heads])
    yield "f_norm_eps", f"{get('attention.layer_norm_epsilon', 0.0):.1e}"
    yield "f_norm_rms_eps", f"{get('attention.layer_norm_rms_epsilon', 0.0):.1e}"
    yield "f_clamp_kqv", f"{get('attention.clamp_kqv', 0.0):.1e}"
    yield "f_max_alibi_bias", f"{get('attention.max_alibi_bias', 0.0):.1e}"
    yield "f_logit_scale", f"{get('logit_scale', 0.0):.1e}"
    yield "n_ff", layers_text(get.per_layer("feed_forward_length"))
    yield "n_expert", str(get("expert_count", 0))
    yield "n_expert_used", str(get("expert_used_count", 0))
    yield "causal attn", str(int(get("attention.causal", True)))
    yield "pooling type", str(get("pooling_type", 0))


def _rope_fields(get: _Keys, rope_type: int) -> Iterable[tuple[str, str]]:
    factor = get("rope.scaling.factor", get("rope.scale_linear", 0.0))
    finetuned = get("rope.scaling.finetuned", False)
    yield "rope type", str(rope_type)
    yield "rope scaling", str(get("rope.scaling.type", "linear"))
    yield "freq_base_train", f"{get('rope.freq_base', 10000.0):.1f}"
    yield "freq_scale_train", f"{1.0 / factor if factor else 1.0:g}"
    yield "n_ctx_orig_yarn", str(get("rope.scaling.original_context_length", get("context_length", 0)))
    yield "rope_finetuned", "yes" if finetuned else "unknown"


@dataclass(frozen=True)
class ModelSize:
    """Elements and bytes of all tensors, and of the repeating layers (without embedding and output matrix)."""

    n_params: int
    n_bytes: int
    repeating_params: int
    repeating_bytes: int

    @classmethod
    def of(cls, file: GGUFFile) -> ModelSize:
        """Totals over the tensor table."""
        tensors = file.tensors.values()
        repeating = [tensor for tensor in tensors if tensor.name not in NOT_REPEATING]
        return cls(
            sum(tensor.element_count for tensor in tensors),
            sum(tensor.nbytes for tensor in tensors),
            sum(tensor.element_count for tensor in repeating),
            sum(tensor.nbytes for tensor in repeating),
        )


def common_type(file: GGUFFile) -> str:
    """Name of the type that most tensors have; f32 without tensors."""
    counts = Counter(tensor.type_id for tensor in file.tensors.values())
    return registry.by_id(counts.most_common(1)[0][0]).name if counts else "f32"


def ftype_text(file: GGUFFile) -> str:
    """Display name of the file type; guessed from the most frequent tensor type when the file has none."""
    stored = scalar_or(file.metadata, "general.file_type", -1)
    if stored >= 0:
        return registry.ftype_display_name(stored)
    common = common_type(file)
    row = registry.usual_ftype(common)
    return registry.ftype_display_name(row.id, guessed=True) if row else f"{common} (guessed)"


def model_description(file: GGUFFile) -> str:
    """Architecture, size class and file type: `llama 8B Q4_0`."""
    return f"{file.get('general.architecture', '?')} {size_class(file.metadata)} {ftype_text(file)}"


def params_text(count: int) -> str:
    """`672.050 B`."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if count >= size:
            return f"{count / size:.3f} {unit}"
    return f"{count / 1e3:.3f} K"


def millions_text(count: int) -> str:
    """`670.196 B`, or M below 1e9."""
    return f"{count / 1e9:.3f} B" if count >= 1e9 else f"{count / 1e6:.3f} M"


def bytes_text(count: int) -> str:
    """`226.003 GiB`, or MiB below one GiB."""
    return f"{count / GIB:.3f} GiB" if count >= GIB else f"{count / MIB:.3f} MiB"


def _size_fields(file: GGUFFile) -> Iterable[tuple[str, str]]:
    size = ModelSize.of(file)
    yield "model type", size_class(file.metadata)
    yield "model ftype", ftype_text(file)
    yield "model params", params_text(size.n_params)
    yield "model size", f"{bytes_text(size.n_bytes)} ({bpw(size.n_bytes, size.n_params):.3f} BPW) "
    yield (
        "repeating layers",
        f"{bytes_text(size.repeating_bytes)} ({bpw(size.repeating_bytes, size.repeating_params):.3f} BPW, "
        f"{millions_text(size.repeating_params)} parameters)",
    )


def bpw(n_bytes: int, n_params: int) -> float:
    """Bits per weight; 0 for no weights."""
    return n_bytes * 8 / n_params if n_params else 0.0


def _latent_fields(get: _Keys) -> Iterable[tuple[str, str]]:
    yield "n_layer_dense_lead", str(get("leading_dense_block_count", 0))
    yield "n_lora_q", str(get("attention.q_lora_rank", 0))
    yield "n_lora_kv", str(get("attention.kv_lora_rank", 0))
    yield "n_ff_exp", str(get("expert_feed_forward_length", 0))
    yield "n_expert_shared", str(get("expert_shared_count", 0))
    yield "expert_weights_scale", f"{get('expert_weights_scale', 0.0):.1f}"
    yield "expert_weights_norm", str(int(get("expert_weights_norm", False)))
    yield "expert_gating_func", GATING.get(get("expert_gating_func", 0), "unknown")
    yield "rope_yarn_log_mul", f"{get('rope.scaling.yarn_log_multiplier', 0.0):.4f}"


# -- vocabulary --------------------------------------------------------------------------------------------


def vocab_lines(vocab: Vocab) -> list[str]:
    """Tokens that end a generation, as noted while the vocabulary is read."""
    if vocab.kind == "none":
        return []
    lines = ["load: printing all EOG tokens:"]
    lines += [f"load:   - {index} ('{vocab.token_text(index)}')" for index in sorted(vocab.eog)]
    return lines


def vocab_summary_lines(vocab: Vocab, metadata: Mapping[str, Any]) -> list[str]:
    """Kind and size of the vocabulary and its special tokens."""
    fields = [("vocab type", VOCAB_KINDS[vocab.kind]), ("n_vocab", str(vocab.n_tokens))]
    fields.append(("n_merges", str(len(metadata.get("tokenizer.ggml.merges", ())))))
    for attribute, label in SPECIAL_TOKENS:
        index = getattr(vocab, attribute)
        if index is not None:
            fields.append((f"{label} token", f"{index} '{vocab.token_text(index)}'"))
    fields += [("EOG token", f"{index} '{vocab.token_text(index)}'") for index in sorted(vocab.eog)]
    longest = max(
        (len(vocab.token_text(i).encode("utf-8", "surrogateescape")) for i in range(vocab.n_tokens)), default=0
    )
    fields.append(("max token length", str(longest)))
    return [f"print_info: {name:<21} = {text}" for name, text in fields]


# -- context -----------------------------------------------------------------------------------------------
