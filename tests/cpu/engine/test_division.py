"""-sm graph: what is divided, where it is cut, and why the rest stays whole."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ikpy.graph.division import Matrix, Part, Placed, divide_attention, divide_networks, divide_output
from ikpy.quants import by_name


def placed(
    matrices: Mapping[str, Matrix], layers: Sequence[str], overridden: Collection[str] = (), **shares: float
) -> Placed:
    """A model whose output is on the device of its last layer."""
    return Placed(matrices, dict.fromkeys(matrices, layers[-1]), overridden, layers, layers[-1], shares)


def test_what_is_divided() -> None:
    """Columns are cut where blocks end; networks with a rule stay whole, and those that one device would have alone."""
    k, r8 = by_name("q4_K"), by_name("q8_0_r8")
    matrices = {
        **{f"blk.{il}.ffn_{part}.weight": Matrix(512, 1024, k) for il in range(4) for part in ("up", "gate")},
        **{f"blk.{il}.ffn_down.weight": Matrix(1024, 512, k) for il in range(4)},
        "blk.2.ffn_up.weight": Matrix(512, 2048, k),
        **{f"blk.1.ffn_{part}_exps.weight": Matrix(512, 192, r8) for part in ("up", "gate")},
        "blk.1.ffn_down_exps.weight": Matrix(192, 512, by_name("q8_0")),
    }
    layers = ("CPU", "CUDA0", "CUDA1", "CUDA1")
    found = divide_networks(placed(matrices, layers, {"blk.3.ffn_gate.weight"}, CUDA0=3.0, CUDA1=1.2, CUDA2=0.0))
    assert sorted(found) == sorted(
        f"blk.1.ffn_{part}{e}.weight" for part in ("up", "gate", "down") for e in ("", "_exps")
    )
    assert found["blk.1.ffn_up.weight"].parts == (Part("CUDA0", 0, 768), Part("CUDA1", 768, 256))
    assert found["blk.1.ffn_down.weight"].axis == "columns"
    assert found["blk.1.ffn_down_exps.weight"].parts == (Part("CUDA0", 0, 128), Part("CUDA1", 128, 64))
    alone = divide_networks(placed(matrices, layers, (), CUDA0=1.0, CUDA1=0.01))
    assert "blk.1.ffn_up.weight" not in alone


def test_output_matrices_are_divided_by_rows() -> None:
    """Of any number of rows, the last part having the rest; the embeddings where they serve as the output too."""
    plain, grouped = (Matrix(512, n, by_name(kind)) for n, kind in ((1001, "q4_K"), (1024, "q4_k_r4")))
    found = divide_output(placed({"token_embd.weight": plain}, ("CUDA0",), CUDA0=1.0, CUDA1=1.0, CUDA2=0.0))
    assert found["token_embd.weight"].parts == (Part("CUDA0", 0, 512), Part("CUDA1", 512, 489))
    both = {"token_embd.weight": plain, "output.weight": grouped}
    found = divide_output(placed(both, ("CUDA0",), CUDA0=0.0, CUDA1=1.0, CUDA2=3.0))
    assert list(found) == ["output.weight"]
    assert found["output.weight"].parts == (Part("CUDA1", 0, 256), Part("CUDA2", 256, 768))
    assert not divide_output(placed(both, ("CPU",), CUDA0=1.0, CUDA1=1.0))
    assert not divide_output(placed(both, ("CUDA0",), ("output.weight",), CUDA0=1.0, CUDA1=1.0))


def matrices(n_heads: int, n_kv: int, head: int, q: str, out: str, *, fused: bool = False) -> dict[str, Matrix]:
    """Attention of layer 0 on states of 1024 elements."""
    rows = {"attn_q": n_heads * head, "attn_k": n_kv * head, "attn_v": n_kv * head}
    if fused:
        rows = {"attn_qkv": sum(rows.values())}
    found = {f"blk.0.{name}.weight": Matrix(1024, n, by_name(q)) for name, n in rows.items()}
    return found | {"blk.0.attn_output.weight": Matrix(n_heads * head, 1024, by_name(out))}


def found(model: dict[str, Matrix], n_kv: int, overridden: Sequence[str] = (), **shares: float) -> Any:
    """Divisions without the prefix of the layer, or why there are none."""
    placed = Placed(model, dict.fromkeys(model, "CUDA0"), overridden, ("CUDA0",), "CUDA0", shares, (n_kv,))
    divisions, reasons = divide_attention(placed)
    return reasons[0] if reasons else {name.split(".")[2]: division for name, division in divisions.items()}


def test_heads_are_divided_in_proportion() -> None:
    """Rows of projections and columns of the output matrix of the same K/V heads, whatever the shares."""
    parts = found(matrices(32, 8, 64, "q4_K", "q4_K"), 8, CUDA0=3.0, CUDA1=1.0, CUDA2=0.0)
    assert parts["attn_q"].parts == (Part("CUDA0", 0, 1536), Part("CUDA1", 1536, 512))
    assert parts["attn_k"].parts == parts["attn_v"].parts == (Part("CUDA0", 0, 384), Part("CUDA1", 384, 128))
    assert parts["attn_output"].axis == "columns" and parts["attn_output"].parts == parts["attn_q"].parts
    parts = found(matrices(8, 2, 64, "q4_K", "q4_K"), 2, CUDA0=1.0, CUDA1=2.0, CUDA2=1.0)
    assert parts["attn_k"].parts == (Part("CUDA0", 0, 64), Part("CUDA1", 64, 64))
    # Two heads of 128 columns are a block of 256.
    parts = found(matrices(10, 10, 128, "q4_K", "q4_K"), 10, CUDA0=1.0, CUDA1=1.0)
    assert parts["attn_k"].parts == (Part("CUDA0", 0, 768), Part("CUDA1", 768, 512))
    assert len(found(matrices(10, 10, 128, "q4_K", "q8_0"), 10, CUDA0=1.0, CUDA1=1.0)["attn_k"].parts) == 2
    # Sixteen interleaved rows are two of these heads of keys; rows of q, k and v lie one behind the other.
    for fused in (False, True):
        model = matrices(8, 4, 8, "bf16_r16", "f16", fused=fused)
        assert "attn_output" in found(model, 4, CUDA0=1.0, CUDA1=1.0)
        assert "parted" in found(matrices(4, 2, 8, "bf16_r16", "f16", fused=fused), 2, CUDA0=1.0, CUDA1=1.0)


def test_heads_that_are_left_go_round() -> None:
    """What one layer gives too many of, the next ones give less of; GPUs without a share get none."""
    devices = ("CUDA0", "CUDA1", "CUDA2")
    for n_kv, shares, sums in ((2, (1.0, 1.0, 1.0), (4, 4, 4)), (8, (2.0, 1.0, 0.0), (32, 16, 0))):
        layer, model = matrices(8, n_kv, 64, "q8_0", "q8_0"), {}
        for il in range(6):
            model |= {name.replace("blk.0", f"blk.{il}"): matrix for name, matrix in layer.items()}
        where = dict.fromkeys(model, "CUDA0")
        shared = dict(zip(devices, shares, strict=True))
        divisions, reasons = divide_attention(Placed(model, where, (), ("CUDA0",) * 6, "CUDA0", shared, (n_kv,) * 6))
        assert not reasons
        parts = [part for il in range(6) for part in divisions[f"blk.{il}.attn_k.weight"].parts]
        assert tuple(sum(part.length // 64 for part in parts if part.device == d) for d in devices) == sums
        counts = {tuple(part.length for part in divisions[f"blk.{il}.attn_k.weight"].parts) for il in range(6)}
        assert all(sum(lengths) == 64 * n_kv for lengths in counts)


def latent(n_heads: int, value: int, q: str, out: str, *, lite: bool = False) -> dict[str, Matrix]:
    """Latent attention of layer 0 with heads of 192, latents of 512 + 64."""
    rows = {
        "attn_q" if lite else "attn_q_b": n_heads * 192,
        "attn_kv_a_mqa": 576,
        "attn_kv_b": n_heads * (128 + value),
        "attn_k_b": 512,
        "attn_v_b": value,
    }
    found = {f"blk.0.{name}.weight": Matrix(512, n, by_name(q)) for name, n in rows.items()}
    return found | {"blk.0.attn_output.weight": Matrix(n_heads * value, 1024, by_name(out))}


def test_latent_attention_is_divided_by_heads() -> None:
    """In whole blocks of columns of the output matrix; what is the same for all heads is not divided."""
    for lite in (False, True):
        parts = found(latent(16, 128, "q8_0", "q8_0", lite=lite), 16, CUDA0=3.0, CUDA1=1.0, CUDA2=0.0)
        assert sorted(parts) == ["attn_k_b", "attn_kv_b", "attn_output", "attn_q" if lite else "attn_q_b", "attn_v_b"]
        assert {division.parts for division in parts.values()} == {(Part("CUDA0", 0, 12), Part("CUDA1", 12, 4))}
        assert parts["attn_output"].axis == "columns"
        assert parts["attn_output"].nbytes(1600) == {"CUDA0": 1200, "CUDA1": 400}
    # Two heads of 128 columns are a block of 256, four of 64.
    parts = found(latent(16, 128, "q8_0", "q4_K"), 16, CUDA0=5.0, CUDA1=3.0, CUDA2=0.0)
    assert parts["attn_q_b"].parts == (Part("CUDA0", 0, 10), Part("CUDA1", 10, 6))
    parts = found(latent(16, 64, "q8_0", "q4_K"), 16, CUDA0=5.0, CUDA1=3.0, CUDA2=0.0)
    assert all(part.length % 4 == 0 for part in parts["attn_q_b"].parts)
    assert "heads cannot be parted" in found(latent(2, 64, "q8_0", "q4_K"), 2, CUDA0=1.0, CUDA1=1.0)
    assert "one head" in found(latent(1, 128, "q8_0", "q8_0"), 1, CUDA0=1.0, CUDA1=1.0)
    assert "kind" in found(latent(16, 128, "q8_0", "q8_0"), 0, CUDA0=1.0, CUDA1=1.0)
    for name in ("attn_kv_a_mqa.weight", "attn_k_b.weight", "attn_q_a_norm.weight"):
        assert "rule" in found(latent(16, 128, "q8_0", "q8_0"), 16, [f"blk.0.{name}"], CUDA0=1.0, CUDA1=1.0)


def test_why_attention_stays_whole() -> None:
    model = matrices(8, 2, 128, "q4_K", "q4_K")
    shares = {"CUDA0": 1.0, "CUDA1": 1.0}
    for name in ("attn_v.weight", "attn_q.bias", "attn_k_norm.weight", "attn_sinks.weight"):
        assert "rule" in found(model, 2, [f"blk.0.{name}"], **shares)
    assert "attn_v" in found(model, 2, ["blk.0.attn_norm.weight", "blk.0.ffn_up.weight"], **shares)
    assert "kind" in found(model, 0, **shares)
    assert "one K/V head" in found(model, 1, **shares)
    assert "one device" in found(model, 2, CUDA0=1.0, CUDA1=0.0)
    assert "parted" in found(matrices(2, 2, 64, "q4_K", "q4_K"), 2, **shares)
