"""Command lines that people use on GPUs: parsed, placed as they say, run through the tools; log lines."""

from __future__ import annotations

import html
import re
import shlex
from pathlib import Path

import pytest

from ikpy.backends.cuda import devices as cuda_devices
from ikpy.cli import main
from ikpy.cli.parser import parse
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams, ModelParams
from ikpy.errors import UsageError
from ikpy.graph.placement import CPU, Device, Placement, PlacementParams, place
from scripts.make_deepseek_header import write_header
from tests.cuda.models import emulated
from tests.shared import DATA, SHARED

N_LAYER, N_DENSE = 61, 3
FOUR = tuple(Device(f"CUDA{i}", 24 << 30) for i in range(4))
TEXT = DATA.parent.parent / "ikpy" / "assets" / "demo-text.txt"


def deepseek_v3() -> dict[str, int]:
    """Names of DeepSeek-V3's tensors with sizes in proportion."""
    sizes = {"token_embd.weight": 900, "output_norm.weight": 1, "output.weight": 900}
    for il in range(N_LAYER):
        block = f"blk.{il}."
        sizes |= {f"{block}{name}.weight": 20 for name in ("attn_q_a", "attn_q_b", "attn_kv_a_mqa", "attn_output")}
        sizes |= {f"{block}{name}.weight": 15 for name in ("attn_kv_b", "attn_k_b", "attn_v_b")}
        if il < N_DENSE:
            sizes |= {f"{block}ffn_{part}.weight": 130 for part in ("gate", "up", "down")}
        else:
            sizes[f"{block}ffn_gate_inp.weight"] = 2
            sizes |= {f"{block}ffn_{part}_shexp.weight": 15 for part in ("gate", "up", "down")}
            sizes |= {f"{block}ffn_{part}_exps.weight": 3700 for part in ("gate", "up", "down")}
    return sizes


def placed(line: str, devices: tuple[Device, ...] = FOUR) -> Placement:
    """Where a command line puts DeepSeek-V3."""
    with emulated(len(devices)):
        params = parse(shlex.split(line), "server")
    assert not [w for w in params.warnings if "GPU" in w or "no effect: -ot" in w], params.warnings
    return place(deepseek_v3(), N_LAYER, params.placement_params(), devices)


def experts(where: Placement, layer: int) -> set[str]:
    return {where.tensors[f"blk.{layer}.ffn_{part}_exps.weight"] for part in ("gate", "up", "down")}


def test_experts_on_the_cpu() -> None:
    line = "-m x.gguf -rtr -fa -mla 2 -amb 512 -fmoe -ctk q8_0 -c 32768 -ngl 63 --override-tensor exps=CPU -t 24"
    where = placed(line, FOUR[:1])
    assert all(experts(where, il) == {CPU} for il in range(N_DENSE, N_LAYER))
    assert where.tensors["blk.10.attn_q_a.weight"] == where.tensors["blk.10.ffn_up_shexp.weight"] == "CUDA0"
    assert where.tensors["output.weight"] == "CUDA0" and where.tensors["token_embd.weight"] == CPU
    assert where.n_offloaded == N_LAYER and set(where.caches) == {"CUDA0"}


@pytest.mark.parametrize(
    "rules",
    [
        "-ot exps=CPU",
        "-ot .ffn_.*_exps.=CPU",
        "--override-tensor down_exps=CPU,gate_exps=CPU,up_exps=CPU",
        '-ot "ffn_down_exps=CPU,gate_exps=CPU" -ot up_exps=CPU',
        "--cpu-moe",
        "--n-cpu-moe 99",
    ],
)
def test_ways_to_say_that_experts_stay(rules: str) -> None:
    where = placed(f"-m x.gguf -ngl 99 {rules}", FOUR[:1])
    assert {name for name, device in where.tensors.items() if device == CPU} == {
        "token_embd.weight",
        *(name for name in where.tensors if "_exps" in name),
    }


def test_some_layers_whole_on_a_device() -> None:
    where = placed(r'-m x.gguf -ngl 63 -ot "blk\.(3|4|5)\.ffn_.*=CUDA0" --override-tensor exps=CPU', FOUR[:1])
    assert [experts(where, il) for il in (3, 4, 5, 6)] == [{"CUDA0"}] * 3 + [{CPU}]


def test_layers_dealt_out_to_devices() -> None:
    line = (
        r'-m x.gguf -c 16384 -ngl 99 -ot "blk\.(2[5-9]|[3-6][0-9])\..*_exps\.=CPU" -ot "blk\.([1-6])\..*_exps\.=CUDA0" '
        r'-ot "blk\.([7-9]|1[0])\..*_exps\.=CUDA1" -ot "blk\.(1[1-5])\..*_exps\.=CUDA2" '
        r'-ot "blk\.(1[6-9]|2[0-4])\..*_exps\.=CUDA3" -fa -mla 3 -fmoe'
    )
    where = placed(line)
    expected = {
        3: "CUDA0",
        6: "CUDA0",
        7: "CUDA1",
        10: "CUDA1",
        11: "CUDA2",
        16: "CUDA3",
        24: "CUDA3",
        25: CPU,
        60: CPU,
    }
    assert {il: next(iter(experts(where, il))) for il in expected} == expected


def test_attention_kv_b_on_the_cpu() -> None:
    where = placed("-m x.gguf -ngl 99 --override-tensor exps=CPU,attn_kv_b=CPU", FOUR[:1])
    assert where.tensors["blk.5.attn_kv_b.weight"] == CPU and where.tensors["blk.5.attn_k_b.weight"] == "CUDA0"


def test_digits_in_brackets_mean_digits() -> None:
    """`[0-10]` is the digits 0 and 1: the rule takes what it says, and the log shows how much that is."""
    rule = r'-m x.gguf -ngl 100 -ot "blk\.[0-10]\.ffn=CUDA0,ffn=CPU"'
    where = placed(rule, FOUR[:1])
    assert [r.taken for r in where.rules] == [6, 3 + 58 * 7]


def test_tensor_split_of_four_devices() -> None:
    where = placed("-m x.gguf -c 8192 -ngl 27 -ts 17,20,21,45 --no-warmup -mla 2")
    counts = [where.layers.count(device) for device in (CPU, *(d.name for d in FOUR))]
    assert counts[0] == N_LAYER - 27 and sum(counts[1:]) == 27
    assert counts[1] <= counts[2] <= counts[3] < counts[4]


def test_rules_for_devices_that_do_not_exist() -> None:
    with pytest.raises(UsageError, match=r"blk=CUDA2; available buffer types: CPU, CUDA0, CUDA1"):
        placed("-m x.gguf -ot blk=CUDA2", FOUR[:2])


def test_offload_policy_and_cuda_parameters() -> None:
    with emulated(1):
        params = parse(
            shlex.split("-op 26,0,27,0,29,0 -cuda graphs=0,offload-batch-size=64,wgmma=0,fusion=1,x=y -no-ooae"),
            "server",
        )
    devices = params.device_params()
    assert devices.policy == {"MUL_MAT": False, "FUSED_UP_GATE": False, "MUL_MAT_ID": False, "MOE_FUSED_UP_GATE": False}
    assert (devices.graphs, devices.offload_batch, devices.only_active_experts) == (False, 64, False)
    assert not devices.wgmma
    assert any("invalid parameter x=y -> ignored" in w for w in params.warnings)


def test_deepseek_v3_has_118_splits_with_experts_on_the_cpu(tmp_path: Path) -> None:
    """As the users' logs say for one GPU: the embedding, and two borders per layer with experts."""
    path = tmp_path / "deepseek-v3.gguf"
    write_header(path, "q8_0")
    params = ModelParams(header_only=True, placement=PlacementParams(rules=(("exps", CPU),)))
    with emulated(1, mib=1 << 16):
        context = Context(
            Model.load(path, params), ContextParams(n_ctx=32768, n_ubatch=512, n_threads=8, type_k="q8_0")
        )
    path.unlink()
    assert context.n_graph_splits == 118
    assert context.devices is not None
    assert context.devices.cache_bytes() == {"CUDA0": 61 * 32768 * 576 // 32 * 34}


GPU_OPTION = re.compile(r" (-ngl|--n-gpu-layers|-ot|--override-tensor|-op|-sm|-ts|-mg|-nkvo|--gpu-layers) ")
TOOL_LINE = re.compile(r"llama-(server|cli|sweep-bench|perplexity|batched-bench|imatrix) (.*)")


def lines_of_users() -> list[tuple[str, str]]:
    """Tool and arguments of every line with options for GPUs in the users' discussions."""
    found = set()
    for path in sorted((SHARED / "seeds").glob("*")):
        text = re.sub(r"\\\s*\n\s*(?:> ?)?", " ", html.unescape(path.read_text(errors="replace")))
        for match in filter(None, map(TOOL_LINE.search, text.splitlines())):
            rest = re.split(r" (?:2>&1|\||>|&&|;)(?: |$)|[`<]", match[2])[0]
            if GPU_OPTION.search(f"{rest} ") and "$(" not in rest:
                found.add((match[1], re.sub(r"\$\{?\w+\}?", "x", rest)))
    return sorted(found)


@pytest.mark.skipif(not (SHARED / "seeds").exists(), reason="the users' discussions are not here")
def test_lines_of_the_users_are_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No option for GPUs in them is unknown or without effect."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wiki.test.raw").write_text("x")
    refused, n = [], 0
    with emulated(4):
        for tool, rest in lines_of_users():
            try:
                arguments = shlex.split(rest)
            except ValueError:  # prose
                continue
            try:
                params = parse(arguments, tool)
            except UsageError as error:
                refused.append(f"{error}: {rest}")
                continue
            n += 1
            bad = [w for w in params.warnings if GPU_OPTION.search(f" {w} ".replace(",", " ")) or "CUDA" in w]
            assert not bad, f"{bad}: {rest}"
    assert n >= 40
    # Half sentences, and a model's path with a blank in it.
    assert len(refused) <= 3, refused


# tools


def perplexity(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[float, str]:
    """Final estimate of the bundled model, and the log."""
    arguments = ["perplexity", "-f", str(TEXT), "-c", "64", "--chunks", "2", "-t", "1", *line.split()]
    assert main(arguments) == 0
    out = capsys.readouterr()
    found = re.search(r"PPL over 2 chunks for n_ctx=64 = ([0-9.]+)", out.out + out.err)
    assert found, out.err
    return float(found[1]), out.err


def test_perplexity_is_the_same_and_the_log_says_where(capsys: pytest.CaptureFixture[str]) -> None:
    truth, log = perplexity("-ngl 0", capsys)
    assert "graph splits = 1" in log
    with emulated(1):
        ours, log = perplexity("-ngl 99 -ot exps=CPU -mla 3 -fa -fmoe -amb 512 -ctk f16 -op 27,0,29,0", capsys)
    assert ours == pytest.approx(truth, abs=1e-4)
    for expected in (
        "XXXXXXXXXXXXXXXXXXXXX Setting offload policy for op MUL_MAT_ID to OFF",
        "ggml_cuda_init: found 1 CUDA devices:\n  Device 0: emulated, compute capability 8.0\n",
        "Tensor blk.1.ffn_up_exps.weight (size = 1.00 MiB) buffer type overridden to CPU",
        "llm_load_tensors: offloading 4 repeating layers to GPU",
        "llm_load_tensors: offloading non-repeating layers to GPU",
        "llm_load_tensors: offloaded 5/5 layers to GPU",
        "llm_load_tensors:      CUDA0 buffer size =",
        "llama_kv_cache_init:      CUDA0 KV buffer size =",
        "CUDA0 compute buffer size =",
        "graph splits = 8",
    ):
        assert expected in log, f"{expected!r} is missing in:\n{log}"


def test_fit_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    truth, _ = perplexity("-ngl 0", capsys)
    with emulated(1, mib=32):
        ours, log = perplexity("--fit --fit-margin 2", capsys)
        assert cuda_devices.available()[0].memory().free >= 2 << 20
    assert ours == pytest.approx(truth, abs=1e-4)
    assert re.search(r"fit: -ngl \d+ --n-cpu-moe \d+", log)


def test_cuda_info_lists_devices(capsys: pytest.CaptureFixture[str]) -> None:
    with emulated(2):
        assert main(["cuda", "info"]) == 0
    assert "CUDA1: emulated, compute capability 8.0, 512 of 512 MiB free" in capsys.readouterr().out


def test_bench_says_where_it_ran(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["bench", "-p", "8", "-n", "2", "-r", "1", "-t", "1", "-ngl", "0,99", "-ot", "exps=CPU", "-nkvo", "0,1"]
    with emulated(1) as kernels:
        assert main(line) == 0
    assert kernels.launched
    out = capsys.readouterr().out
    header, rows = out.splitlines()[0], [row for row in out.splitlines() if "| CUDA " in row]
    assert re.search(r"\| backend +\| ngl \|", header) and "nkvo" in header
    assert len(rows) == 8, out
