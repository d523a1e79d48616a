"""Writes the tiny checkpoints of tests/data/convert with transformers and records its float32 logits.

    pip install torch transformers sentencepiece        # Python 3.11 or newer
    python scripts/make_convert_golden.py [NAME ...]

Weights are random, rounded to bf16 and stored so; the logits are those of the rounded weights in float32. Every
folder is a checkpoint as a hub would serve it, plus golden.npz (tokens i64 [T], logits f32 [T, V / 2] of every second
token of the vocabulary) and tokens.json (text -> ids).
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

ROOT = Path(__file__).parents[1]
OUT = ROOT / "tests" / "data" / "convert"
CORPUS = ROOT / "ikpy" / "assets" / "demo-text.txt"
N_VOCAB, N_TOKENS = 384, 32
TEXTS = (
    "Hello world",
    " two  spaces and\ttabs\n\nlines",
    "It's 12345.67 o'clock; we'll see 100 % of THEM.",
    "Äpfel, naïve 日本語 текст 🙂",
    "def f(x):\n    return x**2  # ok",
)
TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"

C = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3 = rf"{C}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


def splits(*patterns: str) -> pre_tokenizers.PreTokenizer:
    """Byte-level pre-tokenizer with its own split expressions."""
    parts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*parts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def gpt2_style(digits: bool) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(True), byte_level]) if digits else byte_level


def train_byte_level(
    pre: pre_tokenizers.PreTokenizer, special: list[str], bos: str | None, ignore_merges: bool = False
) -> Tokenizer:
    """Byte-level BPE over the demo text; bos is put in front of every text if given."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=N_VOCAB - len(special) - 1, initial_alphabet=alphabet, show_progress=False, special_tokens=[]
    )
    tokenizer.train([str(CORPUS)], trainer)
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return tokenizer


def train_sentencepiece(folder: Path, prefix: bool) -> Tokenizer:
    """BPE with byte fallback; tokenizer.model, and tokenizer.json made from it the way transformers does."""
    import sentencepiece

    # The model file records both paths: they are given relative to its folder.
    text = folder / CORPUS.name
    shutil.copyfile(CORPUS, text)
    with contextlib.chdir(folder):
        sentencepiece.SentencePieceTrainer.train(
            input=text.name, model_prefix="tokenizer", model_type="bpe", vocab_size=N_VOCAB,
            byte_fallback=True, character_coverage=0.999, add_dummy_prefix=prefix, remove_extra_whitespaces=False,
            normalization_rule_name="identity", minloglevel=2, hard_vocab_limit=True, split_digits=True,
        )  # fmt: skip
    text.unlink()
    (folder / "tokenizer.vocab").unlink()
    processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    pieces = [processor.id_to_piece(i) for i in range(processor.vocab_size())]
    ids = {piece: i for i, piece in enumerate(pieces)}
    merges = [(p[:i], p[i:], j) for p, j in ids.items() for i in range(1, len(p)) if p[:i] in ids and p[i:] in ids]
    merges.sort(key=lambda m: (m[2], ids[m[0]], ids[m[1]]))
    model = models.BPE(vocab=ids, merges=[m[:2] for m in merges], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    steps = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", ids["<s>"])])
    return tokenizer


def write_tokenizer(folder: Path, kind: str) -> None:
    """Tokenizer files, generation_config.json and tokens.json."""
    eot = None
    if kind in ("spm", "spm-noprefix", "spm-json"):
        tokenizer, bos, eos = train_sentencepiece(folder, kind != "spm-noprefix"), "<s>", "</s>"
        if kind == "spm-json":
            (folder / "tokenizer.model").unlink()
    else:
        pre, special, with_bos, merges = {
            "llama3": (splits(LLAMA3), ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"], 1, True),
            "qwen2": (splits(QWEN2), ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], 0, False),
            "gpt-4o": (splits(GPT4O), ["<|startoftext|>", "<|return|>", "<|call|>", "<|end|>"], 0, False),
            "deepseek3": (splits(*DEEPSEEK3), ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"], 1, False),
            "glm": (splits(LLAMA3), ["<|endoftext|>", "<|user|>"], 0, False),
            "gpt2": (gpt2_style(False), ["<|endoftext|>", "<|im_end|>"], 0, False),
            "command-r": (gpt2_style(True), ["<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"], 1, False),
        }[kind]
        bos, eos = special[0], special[1] if with_bos or kind == "gpt-4o" else special[-1]
        tokenizer = train_byte_level(pre, special, bos if with_bos else None, merges)
        eot = special[2] if kind in ("llama3", "gpt-4o") else None
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "bos_token": None if kind == "glm" else bos,
        "eos_token": eos,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    ids = [tokenizer.token_to_id(token) for token in (eos, eot) if token]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids if len(ids) > 1 else ids[0]}))
    encoded = {text: tokenizer.encode(text).ids for text in (*TEXTS, f"one{eos}two")}
    (folder / "tokens.json").write_text(json.dumps(encoded, ensure_ascii=False))


def randomize(model: torch.nn.Module, norm_is_offset: bool, seed: int) -> None:
    """Random weights that give logits of a few units, rounded to bf16."""
    random = torch.Generator().manual_seed(seed)

    def draw(tensor: torch.Tensor, scale: float) -> torch.Tensor:
        return torch.randn(tensor.shape, generator=random) * scale

    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if "inv_freq" in name or "embed_scale" in name or not value.is_floating_point():
            continue
        if "norm" in name:
            new = draw(value, 0.1) + (0.0 if norm_is_offset and "linear_attn" not in name else 1.0)
        elif "scal" in name:
            new = draw(value, 0.1) + 1.0
        elif value.dim() < 2 or "bias" in name:
            new = draw(value, 0.1)
        else:
            new = draw(value, 0.7 if "embed" in name else 1.5 / math.sqrt(value.shape[-1]))
        value.data.copy_(new.bfloat16().float())


OFFSET_NORMS = ("gemma", "gemma2", "gemma3_text", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
BASE: dict[str, Any] = dict(
    vocab_size=N_VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
    pad_token_id=0,
)  # fmt: skip


def moe(n: int, used: int, width: int = 32, **more: Any) -> dict[str, Any]:
    return dict(num_experts_per_tok=used, moe_intermediate_size=width, num_experts=n, num_local_experts=n,
                n_routed_experts=n, **more)  # fmt: skip


def yarn(factor: float, original: int, **more: Any) -> dict[str, Any]:
    return dict(rope_theta=10000.0, rope_type="yarn", factor=factor, original_max_position_embeddings=original, **more)


LLAMA3_ROPE = dict(
    rope_theta=500000.0, rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)  # fmt: skip
MLA = dict(
    kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, n_shared_experts=1,
    first_k_dense_replace=1, num_key_value_heads=4, num_hidden_layers=3,
)  # fmt: skip
DELTA_NET = dict(
    head_dim=32, num_hidden_layers=5, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32,
    linear_value_head_dim=32, linear_conv_kernel_dim=4, shared_expert_intermediate_size=48,
    layer_types=[*["linear_attention"] * 3, "full_attention", "linear_attention"],
)  # fmt: skip
GEMMA4 = dict(
    head_dim=16, global_head_dim=32, sliding_window=8, tie_word_embeddings=True, final_logit_softcapping=30.0
)  # fmt: skip
# With that many heads no cells that a token can choose from have the same score, 0.
INDEXER = dict(q_lora_rank=24, index_topk=12, index_head_dim=16, index_n_heads=6, layer_types=None)
V3_ROUTING = dict(n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.5)

# name -> transformers model type, changes to BASE, tokenizer
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("llama", dict(rope_parameters=LLAMA3_ROPE), "llama3"),
    "llama-spm": (
        "llama",
        dict(attention_bias=True, mlp_bias=True,
             rope_parameters=dict(rope_theta=1e4, rope_type="linear", factor=2.0)),
        "spm",
    ),
    "mistral": ("mistral", dict(head_dim=24, sliding_window=None), "spm-json"),
    "mixtral": (
        "mixtral",
        dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=None, intermediate_size=48),
        "spm",
    ),
    "ministral3": (
        "ministral3",
        dict(head_dim=16, rope_parameters=yarn(4.0, 16, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1,
                                               beta_fast=32.0, beta_slow=1.0)),
        "llama3",
    ),
    "qwen2": ("qwen2", dict(rope_parameters=yarn(4.0, 32)), "qwen2"),
    "qwen2moe": ("qwen2_moe", moe(4, 2, shared_expert_intermediate_size=48, norm_topk_prob=False), "qwen2"),
    "qwen3": ("qwen3", dict(head_dim=24, tie_word_embeddings=True), "qwen2"),
    "qwen3moe": ("qwen3_moe", moe(4, 2, head_dim=16, norm_topk_prob=True), "qwen2"),
    "qwen3next": ("qwen3_next", moe(4, 2, norm_topk_prob=True, **DELTA_NET), "qwen2"),
    "qwen35": ("qwen3_5_text", dict(**DELTA_NET), "qwen2"),
    "qwen35moe": ("qwen3_5_moe_text", moe(4, 2, **DELTA_NET), "qwen2"),
    "olmo2": ("olmo2", {}, "gpt2"),
    "olmo3": (
        "olmo3",
        dict(sliding_window=8, num_hidden_layers=4, rope_parameters=yarn(4.0, 16, attention_factor=1.2)),
        "gpt2",
    ),
    "olmoe": ("olmoe", moe(4, 2), "gpt2"),
    "exaone4": ("exaone4", dict(sliding_window=8, sliding_window_pattern=4, num_hidden_layers=4), "gpt2"),
    "exaone-moe": (
        "exaone_moe",
        moe(4, 2, num_shared_experts=1, sliding_window=8, num_hidden_layers=5, first_k_dense_replace=1, **V3_ROUTING),
        "gpt2",
    ),
    "afmoe": (
        "afmoe",
        moe(4, 2, head_dim=16, num_shared_experts=1, sliding_window=8, num_hidden_layers=5, num_dense_layers=1,
            route_scale=2.0, mup_enabled=True),
        "gpt2",
    ),
    "hunyuan-dense": (
        "hunyuan_v1_dense",
        dict(head_dim=16, rope_parameters=dict(rope_type="dynamic", alpha=1000.0, factor=1.0, rope_theta=1e4)),
        "gpt2",
    ),
    "deepseek-v32": ("deepseek_v32", moe(4, 2, **MLA, **V3_ROUTING, **INDEXER), "deepseek3"),
    "glm-dsa": (
        "glm_moe_dsa",
        moe(4, 2, **MLA, **V3_ROUTING, **INDEXER, indexer_types=["full", "shared", "full"]),
        "glm",
    ),
    "seed_oss": ("seed_oss", dict(head_dim=16, attention_bias=True, attention_out_bias=False), "gpt2"),
    "gemma": ("gemma", dict(head_dim=24, tie_word_embeddings=True), "spm-noprefix"),
    "gemma2": (
        "gemma2",
        dict(head_dim=16, sliding_window=12, query_pre_attn_scalar=16, tie_word_embeddings=True, num_hidden_layers=3),
        "spm-noprefix",
    ),
    "gemma3": (
        "gemma3_text",
        dict(head_dim=16, sliding_window=12, query_pre_attn_scalar=16, tie_word_embeddings=True, num_hidden_layers=7,
             rope_parameters={"full_attention": dict(rope_type="linear", factor=8.0, rope_theta=1e6),
                              "sliding_attention": dict(rope_type="default", rope_theta=1e4)}),
        "spm-noprefix",
    ),
    "phi3": ("phi3", dict(sliding_window=12), "spm"),
    "phi3-longrope": (
        "phi3",
        dict(sliding_window=None, max_position_embeddings=256, original_max_position_embeddings=64,
             rope_parameters=dict(rope_type="longrope", rope_theta=1e4, factor=4.0,
                                  original_max_position_embeddings=64,
                                  short_factor=[1.0 + 0.1 * i for i in range(8)],
                                  long_factor=[2.0 + 0.5 * i for i in range(8)])),
        "spm",
    ),
    "gemma4": (
        "gemma4_text",
        dict(**GEMMA4, num_hidden_layers=6, num_kv_shared_layers=2, use_double_wide_mlp=True,
             hidden_size_per_layer_input=16, vocab_size_per_layer_input=384,
             layer_types=["sliding_attention", "full_attention"] * 3),
        "spm-noprefix",
    ),
    "gemma4-moe": (
        "gemma4_text",
        dict(**GEMMA4, num_hidden_layers=4, hidden_size_per_layer_input=0, attention_k_eq_v=True,
             enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=32,
             num_global_key_value_heads=1, layer_types=[*["sliding_attention"] * 3, "full_attention"]),
        "spm-noprefix",
    ),
    "glm4": ("glm4", dict(head_dim=16, attention_bias=True, partial_rotary_factor=0.5), "llama3"),
    "glm4moe": (
        "glm4_moe",
        moe(4, 2, head_dim=16, attention_bias=True, use_qk_norm=True, partial_rotary_factor=0.5, n_shared_experts=1,
            first_k_dense_replace=1, **V3_ROUTING),
        "llama3",
    ),
    "command-r": ("cohere", dict(logit_scale=0.25, tie_word_embeddings=True), "command-r"),
    "cohere2": (
        "cohere2",
        dict(logit_scale=0.25, tie_word_embeddings=True, sliding_window=12, num_hidden_layers=5, head_dim=16),
        "command-r",
    ),
    "dots1": (
        "dots1",
        moe(4, 2, num_key_value_heads=4, head_dim=16, n_shared_experts=2, first_k_dense_replace=1, **V3_ROUTING),
        "qwen2",
    ),
    "hunyuan-moe": (
        "hunyuan_v1_moe",
        dict(num_experts=4, moe_topk=2, head_dim=16, intermediate_size=48,
             rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, alpha=1000.0, factor=1.0)),
        "llama3",
    ),
    "ernie4_5": ("ernie4_5", dict(head_dim=16, tie_word_embeddings=True), "spm"),
    "ernie4_5-moe": (
        "ernie4_5_moe",
        dict(moe_num_experts=4, moe_k=2, moe_num_shared_experts=1, moe_intermediate_size=32, moe_layer_start_index=1,
             moe_layer_interval=1, num_hidden_layers=3),
        "spm",
    ),
    "granite": (
        "granite",
        dict(embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=0.5, attention_multiplier=0.3),
        "gpt2",
    ),
    "granitemoe": (
        "granitemoe",
        dict(embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=0.5, attention_multiplier=0.3,
             num_local_experts=4, num_experts_per_tok=2, intermediate_size=48),
        "gpt2",
    ),
    "smollm3": ("smollm3", dict(num_hidden_layers=5, no_rope_layers=None, tie_word_embeddings=True), "llama3"),
    "minimax-m2": (
        "minimax_m2",
        dict(num_local_experts=4, num_experts_per_tok=2, head_dim=16, rotary_dim=8, intermediate_size=32),
        "gpt-4o",
    ),
    "llama4": (
        "llama4_text",
        dict(num_local_experts=4, num_experts_per_tok=1, head_dim=16, intermediate_size=32, intermediate_size_mlp=96,
             interleave_moe_layer_step=2, num_hidden_layers=5, rope_parameters=LLAMA3_ROPE),
        "gpt-4o",
    ),
    "gpt-oss": (
        "gpt_oss",
        dict(num_local_experts=4, num_experts_per_tok=2, head_dim=16, intermediate_size=64, sliding_window=12,
             num_hidden_layers=3, rope_parameters=yarn(8.0, 64, beta_fast=32.0, beta_slow=1.0, truncate=True)),
        "gpt-4o",
    ),
    "gpt-oss-bf16": (
        "gpt_oss",
        dict(num_local_experts=4, num_experts_per_tok=2, head_dim=16, intermediate_size=64, sliding_window=12,
             num_hidden_layers=2, rope_parameters=yarn(8.0, 64, beta_fast=32.0, beta_slow=1.0, truncate=True)),
        "gpt-4o",
    ),
    "deepseek-v2-lite": (
        "deepseek_v2",
        moe(4, 2, **MLA, q_lora_rank=None, topk_method="greedy", n_group=1, topk_group=1, routed_scaling_factor=1.0,
            norm_topk_prob=False),
        "deepseek3",
    ),
    "deepseek-v3": (
        "deepseek_v3",
        moe(4, 2, **MLA, q_lora_rank=24, **V3_ROUTING, intermediate_size=160,
            rope_parameters=yarn(40.0, 64, mscale=1.0, mscale_all_dim=1.0, beta_fast=32.0, beta_slow=1.0)),
        "deepseek3",
    ),
    "glm4-moe-lite": ("glm4_moe_lite", moe(4, 2, **MLA, q_lora_rank=24, **V3_ROUTING), "glm"),
}  # fmt: skip


def make(name: str) -> None:
    """Writes one checkpoint with its logits."""
    kind, changes, tokenizer = MODELS[name]
    folder = OUT / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = transformers.AutoConfig.for_model(kind, **{**BASE, **changes})
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    randomize(model, norm_is_offset=kind in OFFSET_NORMS, seed=len(name))
    if name == "gpt-oss":
        blocks = mxfp4_experts(model)
    if name == "deepseek-v3":
        stored = fp8_weights(model)
    tokens = np.random.default_rng(7).integers(0, N_VOCAB, N_TOKENS)
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens)[None]).logits[0].float().numpy()
    np.savez(folder / "golden.npz", tokens=tokens, logits=np.ascontiguousarray(logits[:, ::2]))
    model.bfloat16().save_pretrained(folder)
    write_tokenizer(folder, tokenizer)
    if name == "gpt-oss":
        replace(folder, blocks, r"experts\.(gate_up|down)_proj$")
    if name == "deepseek-v3":
        replace(folder, stored, None)
        amend(folder, quantization_config=dict(quant_method="fp8", fmt="e4m3", weight_block_size=[128, 128]))
    print(f"{name}: |logits| {np.abs(logits).mean():.2f}, {sum(f.stat().st_size for f in folder.iterdir())} bytes")


def amend(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}, indent=2))


def replace(folder: Path, tensors: dict[str, torch.Tensor], dropped: str | None) -> None:
    """Puts tensors into the checkpoint; those whose name matches dropped are taken out."""
    import re

    path = folder / "model.safetensors"
    old = {k: v for k, v in load_file(path).items() if not (dropped and re.search(dropped, k))}
    save_file({**old, **tensors}, path, metadata={"format": "pt"})


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def mxfp4_experts(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Random MXFP4 experts: blocks and scales of a gpt-oss checkpoint, their values put into the model [E, n, rows]."""
    random = torch.Generator().manual_seed(3)
    out = {}
    for name, value in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            n_expert, n, rows = value.shape
            codes = torch.randint(0, 16, (n_expert, rows, n // 32, 32), generator=random)
            scales = torch.randint(122, 125, (n_expert, rows, n // 32), generator=random)
            values = E2M1[codes] * torch.exp2(scales[..., None].float() - 127)
            value.data.copy_(values.reshape(n_expert, rows, n).transpose(1, 2))
            out[f"{name}_blocks"] = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
            out[f"{name}_scales"] = scales.to(torch.uint8)
    return out


def fp8_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The linear layers of the blocks as e4m3 with a scale per 128 x 128 block, their values put into the model."""
    random = torch.Generator().manual_seed(4)
    out = {}

    def encode(name: str, value: torch.Tensor) -> None:
        blocks = [-(-n // 128) for n in value.shape]
        scale = 0.002 * (1 + torch.rand(blocks, generator=random))
        spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: value.shape[0], : value.shape[1]]
        stored = (value.data / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        value.data.copy_(stored.float() * spread)
        out[name], out[f"{name}_scale_inv"] = stored, scale

    for name, value in model.named_parameters():
        if not name.endswith("weight") and "experts." not in name:
            continue
        if name.endswith("experts.gate_up_proj"):
            for e in range(value.shape[0]):
                gate, up = value.data[e].chunk(2)
                prefix = f"{name.removesuffix('gate_up_proj')}{e}."
                encode(f"{prefix}gate_proj.weight", gate)
                encode(f"{prefix}up_proj.weight", up)
        elif name.endswith("experts.down_proj"):
            for e in range(value.shape[0]):
                encode(f"{name.removesuffix('down_proj')}{e}.down_proj.weight", value.data[e])
        elif value.dim() == 2 and "_proj" in name and "layers" in name:
            encode(name, value)
    return out


def main(names: list[str]) -> None:
    action: Callable[[str], None] = make
    for name in names or list(MODELS):
        action(name)


if __name__ == "__main__":
    main(sys.argv[1:])
