"""Log lines against the golden capture of the same model."""

from __future__ import annotations

import math
import re

import pytest

import ikpy
from ikpy.cli import main
from ikpy.cli.banner import banner_lines
from ikpy.cli.parser import parse
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams, ModelParams
from ikpy.gguf.reader import GGUFFile
from ikpy.gguf.types import GGUFValueType
from ikpy.gguf.writer import GGUFWriter
from ikpy.models.size_class import size_class
from ikpy.quants.model_shape import ModelShape
from ikpy.tools import model_logs, run_logs
from ikpy.vocab import Vocab
from tests.shared import DATA

GOLDEN = (DATA / "cli" / "llama-sweep-bench-basic.err").read_text().splitlines()


@pytest.fixture(scope="module")
def file():
    with GGUFFile.open(ikpy.default_model_path()) as opened:
        yield opened


def golden(prefix: str) -> list[str]:
    return [line for line in GOLDEN if line.startswith(prefix)]


def test_loader_and_model_summary(file):
    assert model_logs.loader_lines(file, "MODEL") == golden("llama_model_loader: ")
    assert model_logs.meta_lines(file, rope_type=0) == golden("llm_load_print_meta: ")
    assert [line for line in model_logs.loader_lines(file, "MODEL", dump=False) if "- kv" in line] == []


SHOWN_KEYS = (
    *("block_count", "embedding_length", "context_length", "vocab_size", "feed_forward_length", "pooling_type"),
    *("expert_count", "expert_used_count", "expert_feed_forward_length", "expert_gating_func", "logit_scale"),
    *("expert_weights_scale", "expert_weights_norm", "leading_dense_block_count", "attention.kv_lora_rank"),
    *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
    *("attention.layer_norm_rms_epsilon", "attention.clamp_kqv", "attention.causal", "attention.sliding_window"),
    *("rope.dimension_count", "rope.scaling.factor", "rope.scaling.type", "rope.scaling.finetuned", "rope.freq_base"),
    *("rope.scaling.yarn_log_multiplier", "ssm.conv_kernel"),
)


@pytest.mark.parametrize("arch", ["llama", "deepseek2"])
@pytest.mark.parametrize(
    ("kind", "element", "value"),
    [
        (GGUFValueType.STRING, None, "none"),
        (GGUFValueType.FLOAT32, None, math.inf),
        (GGUFValueType.UINT32, None, 2**32 - 1),
        (GGUFValueType.ARRAY, GGUFValueType.INT32, [1, 2]),
        (GGUFValueType.ARRAY, GGUFValueType.INT32, []),
        (GGUFValueType.ARRAY, GGUFValueType.FLOAT32, [math.inf]),
        (GGUFValueType.ARRAY, GGUFValueType.STRING, ["a"]),
    ],
)
def test_summary_of_keys_of_any_type(arch: str, kind: GGUFValueType, element: GGUFValueType | None, value, tmp_path):
    """What is shown, or decides types, before the model was checked stands any header."""
    with GGUFWriter(tmp_path / "model.gguf") as out:
        out.add("general.architecture", GGUFValueType.STRING, arch)
        for key in (*(f"{arch}.{name}" for name in SHOWN_KEYS), "general.file_type", "tokenizer.ggml.tokens"):
            if element is None:
                out.add(key, kind, value)
            else:
                out.add_array(key, element, value)
    with GGUFFile.open(tmp_path / "model.gguf") as opened:
        lines = model_logs.meta_lines(opened)
        assert len(lines) > 40
        assert all(len(line) < 6000 for line in lines)
        assert ModelShape.of(opened.metadata, {}).architecture == arch


def test_vocabulary(file):
    vocab = Vocab.from_metadata(file.metadata)
    assert model_logs.vocab_summary_lines(vocab, file.metadata) == golden("print_info: ")
    printed = model_logs.vocab_lines(vocab)
    assert printed == [line for line in golden("load: ") if "cache size" not in line and "unused" not in line]


def planned(**settings) -> Context:
    """A context of the bundled model, measured from its header."""
    model = Model.load(ikpy.default_model_path(), ModelParams(header_only=True))
    return Context(model, ContextParams(n_ctx=2048, n_threads=1, **settings))


def cache_lines(context: Context) -> list[str]:
    k, v = context.kv.nbytes("kv") or context.kv.nbytes("k"), context.kv.nbytes("v")
    latent = context.graph_params.mla > 0
    return run_logs.kv_cache_lines(k, v, *run_logs.cache_type_names(context.graph_params), latent=latent)


def test_kv_cache():
    lines = cache_lines(planned())
    assert lines == golden("llama_kv_cache_init") + golden("llama_init_from_model: KV self size")
    assert cache_lines(planned(mla=0))[1].endswith(
        "KV self size  =   20.00 MiB, K (f16):   12.00 MiB, V (f16):    8.00 MiB"
    )
    assert "c^KV (q8_0):    4.78 MiB, kv^T: not used" in cache_lines(planned(type_k="q8_0"))[1]


def test_context_lines():
    values = {"n_ctx": 2048, "mla_attn": None, "flash_attn": 1, "ser": "-1, 0"}
    printed = run_logs.context_lines(values)
    assert len(printed) == 3
    assert all(line in GOLDEN for line in printed)


def test_timings_block():
    timings = run_logs.Timings(load=1.01397, total=28.52144)
    for _ in range(8):
        timings.add_decode(256, 3.76155 / 8)
    for _ in range(512):
        timings.add_decode(1, 24.73337 / 512)
    assert run_logs.timing_lines(timings)[1:] == golden("llama_print_timings")


def test_timings_of_nothing():
    lines = run_logs.timing_lines(run_logs.Timings())
    assert lines[3].endswith("0.00 ms /     0 tokens (    0.00 ms per token,     0.00 tokens per second)")
    assert re.search(r"/     1 runs   \(    0.00 ms per token,      inf tokens per second\)", lines[4])


def test_system_info():
    flags = {"AVX": True, "NEON": False}
    assert run_logs.system_info_line(2, None, 8, flags) == "system_info: n_threads = 2 / 8 | AVX = 1 | NEON = 0 | "
    assert "n_threads = 2 (n_threads_batch = 4) / 8 |" in run_logs.system_info_line(2, 4, 8, flags)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"),
        (3, "3"),
        (1e-6, "0.000001"),
        ("a\nb", "a\\nb"),
        ("x" * 40, "x" * 40),
        ("x" * 41, "x" * 37 + "..."),
        (["a", 'q"', "b\\"], '["a", "q\\"", "b\\\\"]'),
        (list(range(100)), "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11..."),
    ],
)
def test_value_text(value, text):
    assert model_logs.value_text(value) == text


@pytest.mark.parametrize(
    ("count", "text"), [(672_050_000_000, "672.050 B"), (12_463_000, "12.463 M"), (2_000, "2.000 K"), (3e12, "3.000 T")]
)
def test_params_text(count, text):
    assert model_logs.params_text(int(count)) == text


def test_millions_text():
    assert model_logs.millions_text(170_400) == "0.170 M"
    assert model_logs.millions_text(670_196_000_000) == "670.196 B"


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"arch": "llama", "block_count": 32, "vocab_size": 32000}, "7B"),
        ({"arch": "llama", "block_count": 32, "vocab_size": 128256}, "8B"),
        ({"arch": "llama", "block_count": 32, "expert_count": 8}, "8x7B"),
        ({"arch": "llama", "block_count": 80, "attention.head_count": 64, "attention.head_count_kv": 8}, "70B"),
        ({"arch": "llama", "block_count": 80, "attention.head_count": 64}, "65B"),
        ({"arch": "deepseek2", "block_count": 61}, "671B"),
        ({"arch": "qwen3", "block_count": 36, "embedding_length": 2560}, "4B"),
        ({"arch": "qwen2", "block_count": 24, "embedding_length": 896}, "1B"),
        ({"arch": "qwen3moe", "block_count": 94}, "235B.A22B"),
        ({"arch": "llama", "block_count": 4}, "?B"),
        ({"arch": "unheard-of", "block_count": 32}, "?B"),
    ],
)
def test_size_class(metadata, expected):
    arch = metadata["arch"]
    keys = {f"{arch}.{key}": value for key, value in metadata.items() if key != "arch"}
    assert size_class({"general.architecture": arch, **keys}) == expected


@pytest.mark.parametrize("tool", ["perplexity", "imatrix"])
def test_the_seed_that_was_asked_for_is_shown(tool: str) -> None:
    """Scripts compare logs, though nothing is random there."""
    params = parse(["-m", "m.gguf", "--seed", "1337"], tool, {})
    assert banner_lines(params)[-1] == "main: seed  = 1337" and not params.warnings


def logged(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Log of a dry run of perplexity with the bundled model, which was trained on 2048 tokens."""
    with pytest.raises(SystemExit, match="0"):
        main(["perplexity", "--dry-run", *arguments])
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "warned"),
    [
        (("-c", "1536", "-b", "3072"), ""),
        (("-c", "4096"), "(4096 specified)"),
        (("-c", "4096", "-b", "8192"), "(4096 specified for each sequence)"),
    ],
)
def test_the_context_of_a_sequence_is_compared_with_the_training(arguments, warned, capsys) -> None:
    """Slots of a server and chunks side by side have a share of the context each."""
    text = "main: warning: model was trained on only 2048 context tokens"
    lines = [line for line in logged(capsys, *arguments).splitlines() if line.startswith(text)]
    assert lines == ([f"{text} {warned}"] if warned else [])


@pytest.mark.parametrize(("arguments", "scale"), [((), "0.25"), (("--rope-scaling", "none"), "1")])
def test_the_scale_of_positions_is_the_one_in_effect(arguments, scale, capsys) -> None:
    """Files with YaRN for long contexts are run without it."""
    yarn = "deepseek2.rope.scaling.type=str:yarn,deepseek2.rope.scaling.factor=float:4"
    assert f"freq_scale    = {scale}\n" in logged(capsys, "--override-kv", yarn, *arguments)
