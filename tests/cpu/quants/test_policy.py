"""Type policy against the reference's recorded decisions, custom rules, importance matrix files."""

from __future__ import annotations

import json
import struct
from dataclasses import replace

import numpy as np
import pytest

from ikpy.errors import FileFormatError, UnsupportedError, UsageError
from ikpy.gguf.reader import GGUFFile
from ikpy.quants import registry
from ikpy.quants.mixture import TypeOptions
from ikpy.quants.model_shape import ModelShape
from ikpy.quants.policy import TypePolicy, is_eligible
from ikpy.quants.recipe import Recipe, parse_rules
from ikpy.tools.imatrix_file import ImportanceMatrix, read_imatrix
from ikpy.tools.quantize_plan import MissingImatrixError, QuantizeOptions, make_plan, refuse_without_imatrix
from tests.shared import DATA, ROOT

RECORDED = json.loads((DATA / "quantize" / "dry-run.json").read_text())
MODEL = ROOT / "ikpy" / "assets" / "tiny-mla-moe-f16.gguf"


@pytest.fixture(scope="module")
def model():
    with GGUFFile.open(MODEL) as file:
        yield file


def options_for(ftype: str, variant: str) -> QuantizeOptions:
    imatrix = ImportanceMatrix({name: np.ones(n, np.float32) for name, n in RECORDED["imatrix"].items()}, 4, "text")
    return QuantizeOptions(
        registry.ftype_by_name(ftype), imatrix=imatrix if variant == "imatrix" else None, dry_run=True
    )


@pytest.mark.parametrize("variant", ["plain", "imatrix"])
@pytest.mark.parametrize("ftype", RECORDED["cases"])
def test_every_file_type_decides_as_recorded(model, ftype, variant):
    expected = RECORDED["cases"][ftype][variant]
    options = options_for(ftype, variant)
    try:
        refuse_without_imatrix(options)
    except MissingImatrixError:
        assert expected["exit"] == 1
        assert expected["types"] == ""
        return
    plan = make_plan(model, options)
    assert (plan.problem is not None) == (expected["exit"] != 0), plan.problem
    types = expected["types"].split()
    if plan.problem is not None:
        name = expected["message"].split("for tensor ")[1].split()[0]
        assert f"Missing importance matrix for tensor {name} " in str(plan.problem)
        types.pop()  # the tensor that failed
    assert len(plan.steps) == len(types)
    for step, recorded in zip(plan.steps, types, strict=True):
        if recorded == "?":  # only that there were no weights was recorded; the total size below covers the type
            assert "did not find weights" in step.note
        else:
            actual = "-" if step.type == step.source_type else step.type
            assert actual == recorded, f"{ftype} {variant} {step.name}: {actual}, recorded {recorded}"
    if plan.problem is None:
        assert f"{plan.nbytes / 2**20:.2f} MB" == expected["size"]


SHAPE = ModelShape("llama", 32, 32, 8, 0, 32000, 4096, True, 32)


def decide(ftype: str, names: list[str], shape=(4096, 4096), **kwargs) -> list[str]:
    policy = TypePolicy(registry.ftype_by_name(ftype), kwargs.pop("model", SHAPE), **kwargs)
    return [policy.choose(name, shape).type for name in names]


def test_dense_mixtures_follow_the_worked_summary():
    layers = [f"blk.{i}.attn_v.weight" for i in range(32)]
    types = decide("Q4_K_M", layers)
    more = [i < 4 or i >= 28 or (i - 4) % 3 == 2 for i in range(32)]
    assert types == ["q6_K" if m else "q5_K" for m in more]
    assert decide("Q4_K_S", layers) == ["q5_K"] * 32
    assert decide("IQ2_XXS", layers[:1], has_imatrix=True) == ["iq4_k"]
    assert decide("Q2_K", ["blk.0.ffn_down.weight", "blk.0.attn_output.weight"]) == ["q3_K", "q3_K"]
    assert decide("Q4_0", [f"blk.{i}.ffn_down.weight" for i in range(5)], has_imatrix=True) == ["q4_1"] * 4 + ["q4_0"]


LLAMA_8B = replace(SHAPE, n_vocab=128256)
LLAMA_70B = replace(LLAMA_8B, n_layer=80, n_head=64, n_attn_v=80)
FALCON = replace(SHAPE, architecture="falcon", n_head=71, n_head_kv=1, n_vocab=65024)
QWEN3_8B = replace(SHAPE, architecture="qwen3", n_layer=36, n_vocab=151936)


@pytest.mark.parametrize(
    ("model", "ftype", "kind", "expected"),
    [
        # Large vocabularies of small models: bits go from the queries to the values.
        (LLAMA_8B, "Q5_K_S", "attn_v", {"q6_K"}),
        (LLAMA_8B, "Q5_K_S", "attn_q", {"q4_K"}),
        (LLAMA_8B, "IQ5_K", "attn_v", {"iq6_k"}),
        (LLAMA_8B, "IQ5_KS", "attn_q", {"iq4_ks"}),
        (LLAMA_8B, "Q5_K_S", "attn_k", {"q5_K"}),
        (replace(LLAMA_8B, n_vocab=127999), "Q5_K_S", "attn_v", {"q6_K"}),
        (replace(LLAMA_8B, n_vocab=127998), "Q5_K_S", "attn_v", {"q5_K"}),
        (replace(LLAMA_8B, n_expert=8), "Q5_K_S", "attn_q", {"q5_K"}),
        (QWEN3_8B, "Q5_K_S", "attn_v", {"q6_K"}),
        (replace(QWEN3_8B, n_embd=2560), "Q5_K_S", "attn_v", {"q5_K"}),
        # 70B: few values, but no row of a file type applies to them.
        (LLAMA_70B, "Q3_K_M", "attn_v", {"q5_K"}),
        (LLAMA_70B, "Q4_K_M", "attn_v", {"q5_K"}),
        (LLAMA_70B, "IQ3_K", "attn_v", {"iq5_k"}),
        (LLAMA_70B, "Q2_K", "attn_v", {"q2_K"}),
        (LLAMA_70B, "Q5_K_S", "attn_v", {"q5_K"}),
        (LLAMA_70B, "Q5_K_S", "attn_q", {"q4_K"}),
        (replace(LLAMA_70B, n_head_kv=64), "Q2_K", "attn_v", {"q3_K"}),
        (FALCON, "Q3_K_L", "attn_output", {"q4_K"}),
        (FALCON, "Q2_K", "attn_output", {"q2_K"}),
        (FALCON, "Q3_K_L", "ffn_down", {"q4_K"}),
        (FALCON, "Q3_K_M", "ffn_down", {"q5_K", "q4_K", "q3_K"}),
        (FALCON, "Q4_K_M", "ffn_down", {"q6_K", "q5_K", "q4_K"}),
        (FALCON, "Q4_K_S", "ffn_down", {"q4_K"}),
        (replace(SHAPE, architecture="dflash-draft"), "Q4_K_M", "attn_v", {"q6_K", "q4_K"}),
        (SHAPE, "Q4_K_M", "attn_v", {"q6_K", "q5_K"}),
    ],
)
def test_rules_of_single_sizes_and_architectures(model, ftype, kind, expected):
    types = decide(ftype, [f"blk.{i}.{kind}.weight" for i in range(model.n_layer)], model=model)
    assert set(types) == expected
    if kind == "ffn_down" and len(expected) == 3:  # the first sixteenth, every layer of `more`, the others
        assert types.index(types[2]) == 2 and types[4] != types[2] == types[6]
    assert decide("Q4_K_M", ["output.weight"], model=model) == ["q8_0" if model is FALCON else "q6_K"]


def test_row_size_fallback_and_interleaving():
    assert decide("Q4_K_S", ["blk.9.attn_q.weight"], (96, 64)) == ["q5_0"]
    assert decide("IQ2_K", ["blk.9.attn_q.weight"], (96, 64)) == ["iq4_nl"]
    assert decide("IQ4_K_R4", ["blk.9.attn_q.weight"], (256, 6)) == ["iq4_k"]
    assert decide("IQ4_K_R4", ["token_embd.weight"], (256, 64)) == ["iq4_k"]
    # iq1_s has longer blocks than iq1_s_r4, which needs four rows.
    assert decide("IQ1_S_R4", ["blk.9.ffn_up.weight"], (96, 8)) == ["iq1_s_r4"]
    assert decide("IQ1_S_R4", ["blk.9.ffn_up.weight"], (96, 6)) == ["iq4_nl"]
    assert decide("IQ1_S_R4", ["blk.9.ffn_up.weight"], (512, 6)) == ["iq1_s"]
    for ftype in ("IQ1_S_R4", "IQ1_M_R4"):
        assert decide(ftype, ["token_embd.weight"], (96, 8), pure=True) == ["iq4_nl"]
    with pytest.raises(UnsupportedError, match="Unsupported tensor size"):
        decide("Q4_K_S", ["blk.9.attn_q.weight"], (100, 64))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("blk.3.hc_attn_fn", False),
        ("blk.3.hc_ffn_fn", False),
        ("output_hc_fn", False),
        ("blk.3.attn_compressor_ape", False),
        ("blk.3.indexer_compressor_ape", False),
        ("blk.3.ffn_gate_inp", False),
        ("blk.3.attn_compressor_kv", True),
        ("blk.3.attn_compressor_gate", True),
        ("blk.3.indexer.proj", True),
        ("blk.3.attn_output_a", True),
    ],
)
def test_tensors_of_deepseek4_that_keep_their_type(name, expected):
    kinds = [is_eligible(f"{name}.weight", (256, 24), k, leave_output=False, router_type="") for k in ("f32", "f16")]
    assert kinds == [expected, expected]
    assert not is_eligible("blk.0.ffn_gate_tid2eid.weight", (6, 256), "i32", leave_output=False, router_type="")


def test_heads_are_those_of_the_first_layer_that_attends():
    keys = {"general.architecture": "lfm2", "lfm2.attention.head_count": 32}
    heads = {"lfm2.attention.head_count_kv": np.array([0, 0, 8, 0, 4])}
    assert ModelShape.of({**keys, **heads}, {}).gqa_ratio == 4
    assert ModelShape.of({**keys, "lfm2.attention.head_count_kv": np.zeros(3, int)}, {}).gqa_ratio == 1
    assert ModelShape.of(keys, {}).gqa_ratio == 1


@pytest.mark.parametrize(
    ("name", "expected"),
    [("ssm_conv1d_q", False), ("ssm_conv1d_k", False), ("ssm_f_a", True), ("ssm_g_b", True), ("ssm_beta", True)],
)
def test_tensors_of_kimi_linear_that_keep_their_type(name, expected):
    assert is_eligible(f"blk.0.{name}.weight", (128, 4096), "bf16", leave_output=False, router_type="") == expected


@pytest.mark.parametrize(
    ("shape", "expected"), [((256,), 0), ((256, 1), 0), ((256, 1, 1), 0), ((256, 2), 1), ((256, 1, 3), 1), ((1, 4), 1)]
)
def test_single_rows_are_vectors(shape, expected):
    """As in the reference, whose tensors have no trailing dimensions of 1 (the gate of a shared expert is one row)."""
    name = "blk.0.ffn_gate_inp_shexp.weight"
    assert is_eligible(name, shape, "f32", leave_output=False, router_type="") == expected


def test_forced_types_override_rules_and_pure():
    forced = TypeOptions(token_embedding="q8_0", output="bf16")
    recipe = Recipe(parse_rules("token_embd=q4_0,attn=iq4_k"))
    names = ["token_embd.weight", "output.weight", "blk.0.attn_q.weight", "blk.0.ffn_up.weight"]
    types = decide("Q4_K_S", names, options=forced, custom_rule=recipe.type_for)
    assert types == ["q8_0", "bf16", "iq4_k", "q4_K"]
    assert decide("Q4_K_S", names, options=forced, pure=True) == ["q8_0", "bf16", "q4_K", "q4_K"]


@pytest.mark.parametrize("pure", [False, True])
def test_forced_types_stand_in_for_those_that_do_not_fit(pure):
    """No block fits rows of 100 columns, but options for single tensors give types that do."""
    forced = TypeOptions(token_embedding="f16", output="bf16")
    names = ["token_embd.weight", "output.weight"]
    assert decide("Q4_K_S", names, shape=(100, 12), options=forced, pure=pure) == ["f16", "bf16"]
    with pytest.raises(UnsupportedError, match=r"rows of output\.weight have 100 values"):
        decide("Q4_K_S", names, shape=(100, 12), options=TypeOptions(token_embedding="f16"), pure=pure)


def test_recipe_text_first_match_and_reports():
    recipe = Recipe(
        parse_rules("""
        # dense layers
        blk\\.[0-2]\\..*=Q8_0   # any case

        ffn_down=iq3_k,blk\\.1\\.=q4_K,
        nothing_like_this=q4_0
        """)
    )
    assert recipe.type_for("blk.1.ffn_down.weight") == "q8_0"
    assert recipe.type_for("blk.7.ffn_down.weight") == "iq3_k"
    assert recipe.type_for("blk.7.attn_q.weight") == ""
    lines = recipe.warnings()
    assert len(lines) == 2
    assert "blk\\.1\\.=q4_K has no effect: its 1 tensors match earlier rules" in lines[0]
    assert "matches no tensor" in lines[1]


def test_empty_items_are_no_rules():
    rules = parse_rules(",attn=q4_K,, ffn=q5_K ,\n,\n")
    assert [str(rule) for rule in rules] == ["attn=q4_K", "ffn=q5_K"]
    assert parse_rules("# all rules are off\n") == []


def test_commas_in_brackets_belong_to_the_expression():
    rules = parse_rules(r"blk\.\d{1,2}\.attn=q4_K,ffn_(up|[a,b])=q5_K")
    assert [str(rule) for rule in rules] == [r"blk\.\d{1,2}\.attn=q4_K", "ffn_(up|[a,b])=q5_K"]


def test_expressions_may_look_around():
    """Their own `=` is not that before the type."""
    rules = parse_rules(r"^(?=.*ffn)(?=.*down)=q6_K,(?<=blk\.1\.)attn_q=q5_K,(?=t{1,2}n_v).*=q8_0,a=q4_K")
    assert [rule.type for rule in rules] == ["q6_K", "q5_K", "q8_0", "q4_K"]
    recipe = Recipe(rules)
    names = ["blk.1.ffn_down.weight", "blk.1.attn_q.weight", "blk.0.attn_v.weight", "blk.0.attn_q.weight"]
    assert [recipe.type_for(name) for name in names] == ["q6_K", "q5_K", "q8_0", "q4_K"]
    with pytest.raises(UsageError, match="expected REGEX=TYPE"):
        parse_rules("(?=ffn)")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("attn", "Invalid custom quantization input attn"),
        ("", "Invalid custom quantization input '': it is empty"),
        (" ,\n, ", "it is empty"),
        ("attn=foo", "Invalid quantization type 'foo' in custom quantization input attn=foo"),
        ("blk.(=q4_K", "regular expression of custom rule"),
        ("attn=q8_1", "cannot be stored"),
    ],
)
def test_bad_rules_are_named(text, message):
    with pytest.raises(UsageError) as caught:
        parse_rules(text)
    assert message in str(caught.value)


def legacy_file(entries, trailer=b"") -> bytes:
    data = struct.pack("<i", len(entries))
    for name, calls, values in entries:
        data += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", calls, len(values))
        data += np.asarray(values, "<f4").tobytes()
    return data + trailer


def test_legacy_imatrix_is_read_and_looked_up(tmp_path):
    path = tmp_path / "im.dat"
    entries = [("blk.0.ffn_up.weight", 4, [4.0, 8.0]), ("blk.0.attn_kv_b.weight", 0, [1.0, 3.0])]
    path.write_bytes(legacy_file(entries, struct.pack("<ii", 7, 4) + b"wiki"))
    matrix = read_imatrix(path)
    assert (matrix.chunks, matrix.dataset) == (7, "wiki")
    assert matrix.find("blk.0.ffn_up.weight").tolist() == [1.0, 2.0]
    assert matrix.find("blk.0.ffn_gate.weight").tolist() == [1.0, 2.0]
    assert matrix.find("blk.0.attn_v_b.weight").tolist() == [1.0, 3.0]
    assert matrix.find("blk.0.ffn_down.weight") is None
    assert list(matrix.filtered(["attn"], []).values) == ["blk.0.attn_kv_b.weight"]
    assert list(matrix.filtered([], ["attn"]).values) == ["blk.0.ffn_up.weight"]


def test_damaged_imatrix_gives_one_line(tmp_path):
    whole = legacy_file([("blk.0.ffn_up.weight", 4, [4.0, 8.0])])
    path = tmp_path / "im.dat"
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        with pytest.raises(FileFormatError, match="load_imatrix"):
            read_imatrix(path)
    path.write_bytes(legacy_file([("x", 1, [float("nan")])]))
    with pytest.raises(FileFormatError, match="not finite"):
        read_imatrix(path)
    with pytest.raises(UsageError, match="failed to open"):
        read_imatrix(tmp_path / "none.dat")
