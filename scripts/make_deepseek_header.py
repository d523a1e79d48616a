"""Writes a GGUF with DeepSeek-V3's exact metadata and tensor table and no tensor data: a sparse file.

    python scripts/make_deepseek_header.py OUTPUT [--type bf16] [--layers 61] [--experts TYPE] [--attention TYPE]

Its apparent size is that of the real model (1252 GiB in BF16), but it takes a few megabytes on disk. For checks that
read no tensor data: `ikpy quantize --dry-run`, memory predictions of the loader. The tensors are those of a file
with attn_kv_b and both of its halves; the vocabulary has the real length and dummy tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from ikpy.gguf.types import GGUFValueType as VT
from ikpy.gguf.writer import GGUFWriter
from ikpy.quants import registry

N_LAYER, N_LAYER_DENSE = 61, 3
N_VOCAB, N_EMBD, N_FF = 129280, 7168, 18432
N_HEAD, N_NOPE, N_ROT, N_VALUE = 128, 128, 64, 128
Q_LORA_RANK, KV_LORA_RANK = 1536, 512
N_EXPERT, N_EXPERT_USED, N_FF_EXPERT = 256, 8, 2048

Declared = tuple[str, tuple[int, ...], str]


def metadata(writer: GGUFWriter, layers: int, file_type: int) -> None:
    """Hyper-parameters and tokenizer keys as in published files."""
    writer.add("general.architecture", VT.STRING, "deepseek2")
    writer.add("general.type", VT.STRING, "model")
    writer.add("general.name", VT.STRING, "DeepSeek V3 0324")
    writer.add("general.version", VT.STRING, "V3-0324")
    writer.add("general.basename", VT.STRING, "DeepSeek")
    writer.add("general.size_label", VT.STRING, "256x21B")
    integers = {
        "block_count": layers,
        "context_length": 163840,
        "embedding_length": N_EMBD,
        "feed_forward_length": N_FF,
        "attention.head_count": N_HEAD,
        "attention.head_count_kv": N_HEAD,
        "expert_used_count": N_EXPERT_USED,
        "leading_dense_block_count": N_LAYER_DENSE,
        "vocab_size": N_VOCAB,
        "attention.q_lora_rank": Q_LORA_RANK,
        "attention.kv_lora_rank": KV_LORA_RANK,
        "attention.key_length": N_NOPE + N_ROT,
        "attention.value_length": N_VALUE,
        "expert_feed_forward_length": N_FF_EXPERT,
        "expert_count": N_EXPERT,
        "expert_shared_count": 1,
        "expert_gating_func": 2,
        "rope.dimension_count": N_ROT,
        "rope.scaling.original_context_length": 4096,
    }
    floats = {
        "rope.freq_base": 10000.0,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "expert_weights_scale": 2.5,
        "rope.scaling.factor": 40.0,
        "rope.scaling.yarn_log_multiplier": 0.1,
    }
    for key, number in integers.items():
        writer.add(f"deepseek2.{key}", VT.UINT32, number)
    for key, value in floats.items():
        writer.add(f"deepseek2.{key}", VT.FLOAT32, value)
    writer.add("deepseek2.expert_weights_norm", VT.BOOL, True)
    writer.add("deepseek2.rope.scaling.type", VT.STRING, "yarn")
    writer.add("general.file_type", VT.UINT32, file_type)
    writer.add("general.quantization_version", VT.UINT32, 2)
    _vocabulary(writer)


def _vocabulary(writer: GGUFWriter) -> None:
    """Two control tokens, the 256 bytes in their printable form, then dummies."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    mapped = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    tokens = ["<bos>", "<eos>", *(mapped[byte] for byte in range(256))]
    tokens += [f"<t{i}>" for i in range(N_VOCAB - len(tokens))]
    writer.add("tokenizer.ggml.model", VT.STRING, "gpt2")
    writer.add("tokenizer.ggml.pre", VT.STRING, "deepseek-v3")
    writer.add_array("tokenizer.ggml.tokens", VT.STRING, tokens)
    writer.add_array("tokenizer.ggml.token_type", VT.INT32, [3, 3] + [1] * (N_VOCAB - 2))
    writer.add_array("tokenizer.ggml.merges", VT.STRING, ["a b"])
    writer.add("tokenizer.ggml.bos_token_id", VT.UINT32, 0)
    writer.add("tokenizer.ggml.eos_token_id", VT.UINT32, 1)
    writer.add("tokenizer.ggml.padding_token_id", VT.UINT32, 1)
    writer.add("tokenizer.ggml.add_bos_token", VT.BOOL, True)
    writer.add("tokenizer.ggml.add_eos_token", VT.BOOL, False)


def tensors(layers: int, type_name: str, experts: str, attention: str) -> Iterator[Declared]:
    """Name, shape (ne0 first) and type of every tensor in file order."""
    yield "token_embd.weight", (N_EMBD, N_VOCAB), type_name
    for layer in range(layers):
        prefix = f"blk.{layer}."
        for name, shape, tensor_type in _layer(layer < N_LAYER_DENSE, type_name, experts, attention):
            yield prefix + name, shape, tensor_type
    yield "output_norm.weight", (N_EMBD,), "f32"
    yield "output.weight", (N_EMBD, N_VOCAB), type_name


def _layer(dense: bool, type_name: str, experts: str, attention: str) -> list[Declared]:
    rows: list[Declared] = [
        ("attn_norm.weight", (N_EMBD,), "f32"),
        ("attn_q_a.weight", (N_EMBD, Q_LORA_RANK), attention),
        ("attn_q_a_norm.weight", (Q_LORA_RANK,), "f32"),
        ("attn_q_b.weight", (Q_LORA_RANK, N_HEAD * (N_NOPE + N_ROT)), attention),
        ("attn_kv_a_mqa.weight", (N_EMBD, KV_LORA_RANK + N_ROT), attention),
        ("attn_kv_a_norm.weight", (KV_LORA_RANK,), "f32"),
        ("attn_kv_b.weight", (KV_LORA_RANK, N_HEAD * (N_NOPE + N_VALUE)), attention),
        ("attn_k_b.weight", (N_NOPE, N_HEAD * KV_LORA_RANK), attention),
        ("attn_v_b.weight", (KV_LORA_RANK, N_HEAD * N_VALUE), attention),
        ("attn_output.weight", (N_HEAD * N_VALUE, N_EMBD), attention),
        ("ffn_norm.weight", (N_EMBD,), "f32"),
    ]
    if dense:
        return [
            *rows,
            ("ffn_gate.weight", (N_EMBD, N_FF), type_name),
            ("ffn_up.weight", (N_EMBD, N_FF), type_name),
            ("ffn_down.weight", (N_FF, N_EMBD), type_name),
        ]
    return [
        *rows,
        ("ffn_gate_inp.weight", (N_EMBD, N_EXPERT), "f32"),
        ("exp_probs_b.bias", (N_EXPERT,), "f32"),
        ("ffn_gate_exps.weight", (N_EMBD, N_FF_EXPERT, N_EXPERT), experts),
        ("ffn_up_exps.weight", (N_EMBD, N_FF_EXPERT, N_EXPERT), experts),
        ("ffn_down_exps.weight", (N_FF_EXPERT, N_EMBD, N_EXPERT), experts),
        ("ffn_gate_shexp.weight", (N_EMBD, N_FF_EXPERT), type_name),
        ("ffn_up_shexp.weight", (N_EMBD, N_FF_EXPERT), type_name),
        ("ffn_down_shexp.weight", (N_FF_EXPERT, N_EMBD), type_name),
    ]


def write_header(
    path: str, type_name: str = "bf16", *, layers: int = N_LAYER, experts: str = "", attention: str = ""
) -> int:
    """Write the sparse file; returns its apparent size in bytes.

    Matrices get type_name, or `experts` and `attention` (tensor type names) in those roles; the rest is F32.
    """
    writer = GGUFWriter(path)
    file_types = [row.id for row in registry.all_ftypes() if row.base_type == type_name]
    metadata(writer, layers, file_types[0] if file_types else 0)
    for name, shape, tensor_type in tensors(layers, type_name, experts or type_name, attention or type_name):
        writer.add_tensor(name, shape, registry.by_name(tensor_type).id)
    (shard,) = writer.plan()
    with open(path, "wb") as file:
        file.write(shard.header)
        file.truncate(shard.nbytes)
    return shard.nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output")
    parser.add_argument("--type", default="bf16", help="type of the matrices (bf16)")
    parser.add_argument("--experts", default="", help="type of the routed experts (as --type)")
    parser.add_argument("--attention", default="", help="type of the attention matrices (as --type)")
    parser.add_argument("--layers", type=int, default=N_LAYER, help=f"number of layers ({N_LAYER})")
    a = parser.parse_args()
    nbytes = write_header(a.output, a.type, layers=a.layers, experts=a.experts, attention=a.attention)
    print(f"{a.output}: {nbytes / 2**30:.3f} GiB apparent size")


if __name__ == "__main__":
    main()
