"""Shared command-line options: table, parsing rules, environment, warnings and errors."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import subprocess
import sys

import pytest

import ikpy.cli
from ikpy.backends.cuda import devices as cuda_devices
from ikpy.cli import main
from ikpy.cli.config import option_arguments
from ikpy.cli.fields import get_field
from ikpy.cli.help import default_text
from ikpy.cli.options import TOOLS, Effect, all_options, by_name, normalize_name
from ikpy.cli.params import CommonParams
from ikpy.cli.parser import parse
from ikpy.cli.presets import use_of
from ikpy.cli.values import unescape
from ikpy.engine.sampling_params import RANDOM_SEED
from ikpy.errors import UsageError
from tests.shared import ROOT, SHARED


def run(line: str | list[str], tool: str = "perplexity", env: dict[str, str] | None = None) -> CommonParams:
    return parse(line.split() if isinstance(line, str) else line, tool, env or {})


def test_every_destination_exists_and_spellings_are_unique():
    params = CommonParams()
    seen: dict[tuple[str, str], str] = {}
    for row in all_options():
        for name in row.names:
            assert name.startswith("-")
            for letter in row.used:
                assert (name, letter) not in seen, f"{name} belongs to {seen[name, letter]} and {row.name}"
                seen[name, letter] = row.name
        for dest in filter(None, (row.dest, row.also)):
            get_field(params, dest)
        assert row.help and row.group
        assert bool(row.reason) or row.effect in (Effect.USED, Effect.ALWAYS), row.name
        assert set(row.used) <= set(TOOLS.values()), row.name


@pytest.mark.skipif(not (SHARED / "golden/outputs/options.json").exists(), reason="golden option lists not found")
@pytest.mark.parametrize("tool", sorted(set(TOOLS) - {"batched-bench"}))
def test_all_golden_spellings_are_known(tool):
    groups = json.loads((SHARED / "golden/outputs/options.json").read_text())["options"][f"llama-{tool}"]
    names = {name for group in groups for name in group} - {"-h", "--help", "--usage", "--version"}
    assert not sorted(names - set(by_name()))


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("-ngl 99", "model.n_gpu_layers", 99),
        ("--n_gpu_layers 63", "model.n_gpu_layers", 63),
        ("-fa", "context.flash_attn", True),
        ("-fa 0", "context.flash_attn", False),
        ("-fa OFF -b 64", "context.flash_attn", False),
        ("-fa -b 64", "context.flash_attn", True),
        ("-fa off -fa", "context.flash_attn", True),
        ("-no-fa", "context.flash_attn", False),
        ("-mla 2", "context.mla", 2),
        ("--mla-attn 2", "context.mla", 2),  # as llama-bench calls it, and guides do
        ("--attn-max-batch 512", "context.attn_max_batch", 512),
        ("-amb 64", "context.attn_max_batch", 128),
        ("-amb 1024", "context.attn_max_batch", 1024),
        ("-ser 6,1", "context.smart_expert_reduction", (6, 1.0)),
        ("-ctk Q8_0", "context.type_k", "q8_0"),
        ("-ctv q8_kv", "context.type_v", "q8_KV"),
        ("-ctk Q5_1", "context.type_k", "q5_1"),
        ("-ctvd Q4_1", "speculative.type_v", "q4_1"),
        ("-c 4096 -c 8192", "context.n_ctx", 8192),
        ("--ctx_size 2048", "context.n_ctx", 2048),
        ("-s -1", "sampling.seed", RANDOM_SEED),
        ("-s 1337", "sampling.seed", 1337),
        ("--temp -3", "sampling.temperature", 0.0),
        ("--rope-scale 4", "context.rope_freq_scale", 0.25),
        ("-p -n", "prompt.text", "-n"),
        ("-n -1", "prompt.n_predict", -1),
        ("-ot b{1,2}[,]=CPU,(c,d)=CUDA0,,", "model.tensor_overrides", [("b{1,2}[,]", "CPU"), ("(c,d)", "CUDA0")]),
        ("-ot exps=CPU -ot a=CUDA0,b=CPU", "model.tensor_overrides", [("exps", "CPU"), ("a", "CUDA0"), ("b", "CPU")]),
        ("-cmoe", "model.n_cpu_moe", 999),
        ("-ncffn 0", "model.tensor_overrides", []),
        (
            "-ot a=CUDA0 -ncffn 3",
            "model.tensor_overrides",
            [("a", "CUDA0"), (r"^blk\.(?:0|1|2)\.ffn_(?:up|down|gate)\.(?:weight|scale)$", "CPU")],
        ),
        ("--spec-default", "speculative.types", ["ngram-mod:size_n=24,n_min=48,n_max=64"]),
        ("--spec-ngram-mod-n-match 9 --spec-ngram-mod-n-max 5", "speculative.settings", [("size_n", 9), ("n_max", 5)]),
        ("-okv a=int:4294967296", "model.kv_overrides", [("a", 1 << 32)]),
        ("-okv a=int:1,b.c=str:x,y,d=bool:true", "model.kv_overrides", [("a", 1), ("b.c", "x,y"), ("d", True)]),
        ("-ngl all", "model.n_gpu_layers", 999),
        ("-ngl auto", "model.n_gpu_layers", -1),
        ("-fit off", "model.fit", False),
        ("--fit -c 256", "model.fit", True),
        ("-fitt 512", "model.fit_margin", 512),
        ("-fitt 512,768", "model.fit_margins", {0: 512, 1: 768}),
        ("-nopo", "model.offload_policy", [(-1, False)]),
        ("-lm none", "model.use_mmap", False),
        ("-lm mmap+mlock", "model.use_mlock", True),
        ("-m x", "model.prefetch_experts", None),
        ("--prefetch-experts", "model.prefetch_experts", True),
        ("--defer-experts", "context.warmup", False),
        ("--lazy-mode on", "model.lazy_mode", "on"),
        ("--prefetch-experts off", "model.prefetch_experts", False),
        ("--prefetch-experts --prefetch-experts auto", "model.prefetch_experts", None),
        ("--prefetch-experts-threads 7", "model.prefetch_threads", 7),
        ("-sm tensor", "model.split_mode", "layer"),
        ("--spec-type draft-simple,draft-mtp", "speculative.types", ["draft", "mtp"]),
        ("--samplers penalties;top_k;typ_p", "sampling.samplers", ("top_k", "typical_p")),
        ("--sampler-seq eskt", "sampling.samplers", ("top_n_sigma", "top_k", "temperature")),
        ("--override-kv a.b=int:-3 -okv c=bool:true", "model.kv_overrides", [("a.b", -3), ("c", True)]),
        ("-l 15+1.5 -l 3-inf", "sampling.logit_bias", [(15, 1.5), (3, float("-inf"))]),
        ("--samplers top-k;temp;min_p", "sampling.samplers", ("top_k", "temperature", "min_p")),
        ("--sampling-seq kt", "sampling.samplers", ("top_k", "temperature")),
        ("--dry-sequence-breaker none --dry-sequence-breaker ab", "sampling.dry_sequence_breakers", ["a", "b"]),
        ("--save-all-logits x", "perplexity.logits_file", "x"),
        ("--output-format table", "sweep.output_format", "md"),
        ("-sm row", "model.split_mode", "layer"),
    ],
)
def test_values(text, field, value):
    rows = [by_name()[name] for name in map(normalize_name, text.split()) if name in by_name()]
    tool = next(tool for tool, letter in TOOLS.items() if all(letter in row.used for row in rows))
    assert get_field(run(text, tool), field) == value


@pytest.mark.parametrize(
    "line",
    [
        "-m m.gguf -c 32768 -ctk q8_0 -mla 3 -fa 1 -amb 512 -fmoe 1 -rtr 1 -t 24 -tb 32 -ngl 63 -ot exps=CPU -np 1",
        "--model m.gguf --alias x/y --ctx-size 4096 -ctk f16 -mla 2 -fa -amb 1024 -fmoe -ngl 9 --host ::1 --port 80",
        "-m m.gguf -ts 17,20,21,45 -mg 1 -nkvo -sm row -op 27,0,29,0 --numa numactl -thp --no-mmap --mlock",
        "-m m.gguf -ub 4096 -b 4096 -wb --no-warmup --seed 1337 --temp 0 --min-p 0.1 --top-p 0.9 --top-k 20",
        "-m m.gguf --prio 3 --log-colors --no-webui --lookup-cache-dynamic F --verbosity 2 -v --poll 50 --swa-full",
        "-m m.gguf -ot blk\\.(3|4|5)\\.ffn_.*=CUDA0 -ot exps=CPU -ser 6,1 -md draft.gguf --draft 8 --device none",
        "-m m.gguf --spec-replace a b --lookup-cache-static F -cuda graphs=0 -gr -mqkv -muge -khad -vhad --jinja",
    ],
)
@pytest.mark.parametrize("tool", TOOLS)
def test_command_lines_in_circulation_are_accepted(line, tool):
    assert run(line, tool).model.path == "m.gguf"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--ctx-sise 5", "unknown argument: --ctx-sise (did you mean --ctx-size?)"),
        ("--ctx-size=5", "unknown argument: --ctx-size=5 (write the value as its own argument: --ctx-size VALUE)"),
        ("file.gguf", "unknown argument: file.gguf (a model is given with -m)"),
        ("-fmoe 2", "unknown argument: 2 (-fmoe takes 0, 1 or nothing)"),
        ("-m a.gguf text.txt", "unknown argument: text.txt"),
        ("-NGL 3", "unknown argument: -NGL"),
        ("-c abc", "invalid parameter for argument: -c (expected an integer, got 'abc')"),
        ("-m", "invalid parameter for argument: -m (a value is missing)"),
        ("--spec-replace a", "invalid parameter for argument: --spec-replace (a value is missing)"),
        ("-ctk q9", "Invalid cache type: q9"),
        ("-mla 4", "invalid parameter for argument: -mla (expected 0..3, got 4)"),
        ("-ser 6", "invalid parameter for argument: -ser"),
        ("-ser 6,nan", "invalid parameter for argument: -ser (expected a share of at least 0, got 'nan')"),
        ("-l 5+nan", "invalid parameter for argument: -l (expected a number or inf behind the token, got '5+nan')"),
        ("-okv a=int:x", "invalid parameter for argument: -okv"),
        ("-okv a", "invalid parameter for argument: -okv"),
        ("-op 26", "Invalid offload policy argument: 26"),
        ("-ot b{1,2", "Invalid tensor buffer type override: b{1,2"),
        ("-ot exps,a=CPU", "Invalid tensor buffer type override: exps,a=CPU"),
        ("-ctk q3_K", "Invalid cache type: q3_K (known: f32, f16, "),
        ("-ot exps", "Invalid tensor buffer type override: exps"),
        ("-ot (=CPU", "Invalid tensor buffer type override: (=CPU"),
        ("-f -", "failed to open file '-': No such file or directory (standard input is called /dev/stdin)"),
        ("-f /no/such/file", "failed to open file '/no/such/file': No such file or directory"),
        (f"-f {ikpy.default_model_path()}", "is a GGUF file, no text; a model is given with -m"),
        ("--hf-file x.gguf", "--hf-file requires --hf-repo"),
        ("--model-url http://x/y.gguf -hf a/b", "--model-url and --hf-repo exclude each other"),
        ("--fit -ncmoe 3", "-ncmoe | --n-cpu-moe cannot be used with --fit"),
        ("--hellaswag --winogrande", "--hellaswag and --winogrande exclude each other"),
        (
            "--lora-scaled x y",
            "invalid parameter for argument: --lora-scaled (expected FILE SCALE, two words, got 'x y')",
        ),
        ("-gan 4", "self-extend is not supported; extend the context with YaRN instead: --rope-scaling yarn"),
        ("--spec-synth-len 3", "--spec-synth-len: drafts are taken as far as the model agrees"),
        ("--spec-synth-rates 1,0.5", "--spec-synth-rates: drafts are taken as far as the model agrees"),
        ("-ncffn -1", "invalid parameter for argument: -ncffn (expected at least 0, got -1)"),
        ("-c -5", "invalid parameter for argument: -c (expected at least 0, got -5)"),
        ("-b 0", "invalid parameter for argument: -b (expected at least 1, got 0)"),
        ("-n -3", "invalid parameter for argument: -n (expected at least -2, got -3)"),
        ("-c 1000000000000", "invalid parameter for argument: -c (expected at most 2147483647, got 1000000000000)"),
        ("-ngl -9999999999", "invalid parameter for argument: -ngl (expected -2147483648 to 2147483647, got -99"),
        ("-okv a=int:9999999999999999999", "invalid parameter for argument: -okv"),
        ("-t 100000", "invalid parameter for argument: -t (expected at most 1024, got 100000)"),
        ("--chat-template-file /dev/null", "file '/dev/null' holds no chat template"),
        ("--chat-template-file /no/such/file", "failed to open file '/no/such/file': No such file or directory"),
    ],
)
def test_errors(line, message):
    rows = [by_name()[name] for name in map(normalize_name, line.split()) if name in by_name()]
    with pytest.raises(UsageError) as caught:
        run(line, "perplexity" if all("P" in row.used for row in rows) else "cli")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("compressed", "program"),
    [
        (gzip.compress(b"a text", mtime=0), "gunzip"),
        (bz2.compress(b"a text"), "bunzip2"),
        (lzma.compress(b"a text"), "unxz"),
    ],
)
def test_a_compressed_text_is_no_text(compressed: bytes, program: str, tmp_path) -> None:
    """wiki.test.raw.gz as it was downloaded: its perplexity would be a number, too."""
    path = tmp_path / "wiki.test.raw.gz"
    path.write_bytes(compressed)
    with pytest.raises(UsageError, match=f"is compressed: unpack it first \\({program} {path}\\)"):
        run(f"-f {path}", "perplexity")


@pytest.mark.parametrize("line", ["-gan 4", "--video x.mp4", "--spec-synth-len 3", "-ctkd q9"])
def test_what_another_tool_refuses_is_not_used(line):
    """A server's command line runs with the name of another tool put in its place."""
    for tool in ("perplexity", "sweep-bench", "batched-bench", "imatrix"):
        assert run(line, tool).warnings == [f"no effect: {line.split()[0]} (not used by {tool})"]
    for tool in ("server", "cli"):
        with pytest.raises(UsageError):
            run(line, tool)


def test_interactive_contradiction():
    with pytest.raises(UsageError, match="prompt-cache-all"):
        run("--prompt-cache x --prompt-cache-all -i", "cli")


@pytest.mark.parametrize(
    ("line", "warnings"),
    [
        (
            "-ngl 99",
            [f"not compiled with GPU offload support, --gpu-layers option will be ignored: {cuda_devices.why_none()}"],
        ),
        ("-ngl 0", []),
        ("-ot exps=CPU -mg 1 -nkvo", ["no effect: -mg, -nkvo (no usable CUDA device)"]),
        ("--host x --temp 0", ["no effect: --host, --temp (not used by perplexity)"]),
        ("-fmoe -fmoe 1 -gr", []),
        ("-fmoe 0", ["no effect: -fmoe (it is always on)"]),
        ("-t 4k", ["-t: reading 4 from '4k', the rest is not part of the number"]),
        (
            f"-m {ikpy.default_model_path()} -hfr x/y",
            ["no effect: the model is read from --model, nothing is downloaded"],
        ),
        ("-m a.gguf -hfr x/y", []),
        ("-c 512 -fa 1 -mla 3 -ctk q8_0", []),
        ("-ncffn 2 -cmoe", ["no effect: -ncffn, -cmoe (no usable CUDA device)"]),
        ("-lzm auto --moe-cache-mib 0 --spec-draft-sampling greedy", []),
        (
            "--moe-cache-mib 900",
            ["no effect: --moe-cache-mib (experts in host memory run there, or are copied for one batch)"],
        ),
    ],
)
def test_warnings(line, warnings):
    assert run(line).warnings == warnings


def test_named_devices_are_left_out_where_there_is_none():
    params = run("-dev CUDA0,CUDA1", "server")
    assert params.warnings == ["no effect: -dev (no usable CUDA device)"]
    assert cuda_devices.wanted_devices(params.placement_params(), params.device_params()) == []


def test_reranking_stands_for_embeddings_of_its_pooling():
    context = run("--reranking", "server").context
    assert (context.embeddings, context.pooling) == (True, "rank")
    assert run("--reranking --pooling cls", "server").context.pooling == "cls"


def test_penalties_cannot_come_later():
    assert run("--samplers penalties;top_k", "cli").warnings == []
    (warning,) = run("--samplers top_k;penalties", "cli").warnings
    assert "penalties always come first" in warning


def test_defaults_of_tools():
    assert run("").context.n_ctx == 512
    assert run("", "imatrix").log.verbosity == 1
    assert run("", "cli").context.n_ctx == 0
    params = run("-t 3")
    assert (params.n_threads, params.n_threads_batch) == (3, 3)
    assert run("").n_threads >= 1


def test_grammars_and_schemas_may_begin_with_a_byte_order_mark(tmp_path):
    """Some editors write one; as a part of a grammar it is an error that nobody can see."""
    path = tmp_path / "file"
    for option, text in {"--grammar-file": "root ::= [0-9]", "-jf": "{}", "--chat-template-file": "{{ x }}"}.items():
        path.write_bytes(b"\xef\xbb\xbf" + text.encode())
        params = run([option, str(path)], "cli")
        read = (params.sampling.grammar, params.sampling.json_schema, params.prompt.chat_template)
        assert text in read, option
    path.write_bytes(b"\xef\xbb\xbfA")
    assert run(["-f", str(path)], "cli").prompt.text == "\ufeffA", "texts are read as they are"


def test_environment_comes_before_the_command_line_except_for_the_server():
    env = {"LLAMA_ARG_CTX_SIZE": "1024", "LLAMA_ARG_FLASH_ATTN": "0", "LLAMA_ARG_MODEL": "env.gguf"}
    params = run("-c 2048", "cli", env)
    assert (params.context.n_ctx, params.context.flash_attn, params.model.path) == (2048, False, "env.gguf")
    assert run("-c 2048", "server", env).context.n_ctx == 1024
    assert run("", "server", {"LLAMA_ARG_ENDPOINT_SLOTS": "0"}).server.slots is False
    assert run("--no-slots", "server", {"LLAMA_ARG_ENDPOINT_SLOTS": "1"}).server.slots is True
    for word in ("on", "1", "TRUE", "enabled", "auto"):
        assert run("", "cli", {"LLAMA_ARG_FLASH_ATTN": word}).context.flash_attn, word
    assert run("", "server", {"LLAMA_ARG_MMAP": "off"}).model.use_mmap is False
    for tool in TOOLS:
        variables = {"LLAMA_ARG_THREADS": "3", "LLAMA_ARG_OVERRIDE_TENSOR": "exps=CPU", "LLAMA_ARG_TEMPERATURE": "0.25"}
        params = run("-t 2", tool, variables)
        assert params.context.n_threads == (3 if tool == "server" else 2), tool
        assert len(params.model.tensor_overrides) == 1, tool
        assert (params.sampling.temperature == 0.25) is (tool in ("cli", "server")), tool
    assert run("", "server", {"LLAMA_ARG_ALIAS": "a"}).model.alias == "a"
    for name in ("LLAMA_ARG_CACHE_TYPE_K_DRAFT", "LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_K"):
        assert run("", "server", {name: "Q5_0"}).speculative.type_k == "q5_0"
    misspelled = {"LLAMA_ARG_CTXSIZE": "512", "LLAMA_ARG_CTX_SIZE": "512", "LLAMA_OTHER": "1"}
    assert run("", "server", misspelled).warnings == [
        "LLAMA_ARG_CTXSIZE: no option has this variable (did you mean LLAMA_ARG_CTX_SIZE?)"
    ]
    params = run("", "cli", {"LLAMA_ARG_MLOCK": "maybe"})
    assert not params.model.use_mlock and "LLAMA_ARG_MLOCK=maybe" in params.warnings[0]
    with pytest.raises(UsageError, match="LLAMA_ARG_CTX_SIZE"):
        run("", "cli", {"LLAMA_ARG_CTX_SIZE": "many"})


@pytest.mark.parametrize("name", ["-h", "--help", "--usage"])
def test_help_wins(name):
    assert run(f"{name} --nope").action == "help"
    assert run("--version").action == "version"


def test_text_sources_and_escapes(tmp_path):
    file = tmp_path / "text"
    file.write_bytes(b"a\\tb\\q\n\n")
    assert run(["-f", str(file)]).prompt.text == "a\tb\\q\n"
    assert run(["-f", str(file), "--no-escape"]).prompt.text == "a\\tb\\q\n"
    assert run(["-f", str(file)]).prompt.file == str(file)
    assert run(["-bf", str(file)]).prompt.text == "a\\tb\\q\n\n"
    assert run(["-bf", str(file), "-p", "x\\ny"]).prompt.text == "x\ny"
    assert run(["--in-prefix", "\\x41\\'", "-r", "\\n"], "cli").prompt.in_prefix == "A'"
    assert unescape("\\xf0\\x9f\\xa6\\x99 \\x4 \\\\n") == "🦙 \\x4 \\n"


def test_engine_parameters_take_the_command_line():
    params = run("-c 1024 -b 256 -ub 64 -ctk q8_0 -mla 1 -no-fa -ser 2,0.5 -okv a=int:3 -t 2 --rope-freq-base 5e5")
    context = params.context_params(n_seq_max=4)
    assert (context.n_ctx, context.n_batch, context.n_ubatch, context.n_seq_max) == (1024, 256, 64, 4)
    assert (context.type_k, context.mla, context.flash_attn, context.rope_freq_base) == ("q8_0", 1, False, 5e5)
    assert context.smart_expert_reduction == (2, 0.5)
    assert params.model_params().kv_overrides == {"a": 3}


def test_options_page_is_up_to_date():
    result = subprocess.run(
        [sys.executable, "scripts/make_options_doc.py", "--check"], check=False, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}
    )
    assert result.returncode == 0, "run: python scripts/make_options_doc.py"


@pytest.mark.parametrize("tool", TOOLS)
def test_help_divides_what_has_no_effect_from_what_is_refused(tool: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([tool, "--help"]) == 0
    used, _, rest = capsys.readouterr().out.partition("Also accepted, without effect")
    accepted, _, refused = rest.partition("Refused, with the reason:")
    for words, is_refused in ((accepted, False), (refused, True)):
        names = [word for word in words.split() if word.startswith("-")]
        assert names and len(names) == len(set(names))
        for name in names:
            row = by_name(TOOLS[tool])[name]
            assert (row.effect is Effect.REFUSED and TOOLS[tool] in row.used) == is_refused, name
    assert not {"-c", "--warmup", "--context-shift" if tool == "server" else "-m"} & set(rest.split())
    lines = " ".join(used.split())
    assert "flash attention (default: on)" in lines and "reuse of compiled graphs; always on" in lines


def test_help_of_bench_has_the_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    options, _, rest = capsys.readouterr().out.partition("With a CUDA device:")
    gpu, _, idle = rest.partition("Accepted, without effect:")
    assert " --max-gpu N " in idle and "all devices share every" in idle and " -ngl, " in gpu and " --numa " in options
    assert "--max-gpu" not in options + gpu and "-ngl" not in options.split()


def test_values_of_other_programs_that_ask_for_the_default() -> None:
    assert run("-np -1", "server").context.n_parallel == 1
    assert run("--fit off --log-colors auto --webui -c 512", "server").warnings == []
    for variable, text, page in (("UI", "0", "none"), ("WEBUI", "off", "none"), ("WEBUI", "1", "auto")):
        assert run("", "server", {f"LLAMA_ARG_{variable}": text}).server.webui == page
    for value, page in (("true", "auto"), ("false", "none"), ("llamacpp", "llamacpp")):
        words = use_of("", "webui", value)[1]
        assert run(words, "server").server.webui == page
        given = {"true": True, "false": False}.get(value, value)
        assert option_arguments("", "server", "webui", given) == words
    for variable in ("LLAMA_ARG_THINK_BUDGET_MESSAGE", "LLAMA_ARG_REASONING_BUDGET_MESSAGE"):
        assert run("", "server", {variable: "stop"}).server.reasoning_budget_message == "stop"
    with pytest.raises(UsageError, match="-np"):
        run("-np -2", "server")


@pytest.mark.parametrize(("tool", "shown"), [("cli", "0"), ("perplexity", "512"), ("imatrix", "512")])
def test_help_shows_the_default_of_the_tool(tool: str, shown: str) -> None:
    row = by_name()["-c"]
    assert default_text(row, tool) == f" (default: {shown})"
    assert parse([], tool, {}).context.n_ctx == int(shown)
    assert default_text(by_name()["--rope-scale"], tool) == ""  # the field holds its inverse
    assert default_text(by_name()["--repeat-penalty"], tool) == " (default: 1.0)"
