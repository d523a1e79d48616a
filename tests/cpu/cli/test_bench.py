"""Benchmark: option grammar, order of tests, and output forms against golden captures."""

from __future__ import annotations

import io
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest

from ikpy.cli import main
from ikpy.cli.bench_command import BenchCommand, parse_bench
from ikpy.cli.bench_options import BY_NAME
from ikpy.errors import ResourceError, UsageError
from ikpy.tools.bench import Engine, Runner, sample_deviation
from ikpy.tools.bench_output import PRINTERS
from ikpy.tools.bench_tests import BenchTest, bench_tests
from tests.shared import DATA, SHARED

GOLDEN = DATA / "cli"
# What the reference counts, tensors derived at load included.
SIZES = {"MODEL": (29144160, 14560536, 1), "Q4KM.gguf": (11258976, 14560536, 15)}
NUMBER = r"\d+\.\d+ ± \d+\.\d+"


class FakeFile:
    """Metadata of a model."""

    def __init__(self, file_type: int) -> None:
        self.metadata = {
            "general.architecture": "deepseek2",
            "general.file_type": file_type,
            "deepseek2.block_count": 4,
            "tokenizer.ggml.add_bos_token": True,
            "tokenizer.ggml.bos_token_id": 7,
        }
        self.get = self.metadata.get


class FakeEngine(Engine):
    """Counts what is decoded instead of computing."""

    def __init__(self, params) -> None:
        super().__init__(params)
        self.loads: list[str] = []
        self.calls: list[tuple[list[int], int]] = []
        self.clears = 0

    def embeds_only(self, model) -> bool:
        return False

    def load(self, test: BenchTest):
        if test.model not in SIZES:
            raise ResourceError(f"{test.model}: no such file")
        self.loads.append(test.model)
        size, count, file_type = SIZES[test.model]
        return SimpleNamespace(
            size_bytes=size, n_params=count, gguf=FakeFile(file_type), hparams=SimpleNamespace(n_vocab=64)
        )

    def context(self, model, test: BenchTest):
        def clear() -> None:
            self.clears += 1

        return SimpleNamespace(kv=SimpleNamespace(clear=clear, keep_checkpoint=lambda seq: None))

    def decode(self, context, tokens: np.ndarray, position: int) -> None:
        assert tokens.dtype == np.int32 and tokens.min() >= 0 and tokens.max() < 64
        self.calls.append((tokens.tolist(), position))


def command(line: str) -> BenchCommand:
    return parse_bench(line.split())


def program(line: str) -> int:
    return main(line.split())


def run_bench(line: str, form: str | None = None) -> tuple[str, FakeEngine]:
    params = command(line).params(lambda: "MODEL")
    engine = FakeEngine(params)
    stream = io.StringIO()
    printer = PRINTERS[form or params.output](params, stream)
    printer.begin()
    runner = Runner(params, engine)
    for test in bench_tests(params):
        printer.result(runner.run(test))
    printer.end()
    return stream.getvalue(), engine


def without_times(text: str, form: str) -> str:
    """Replace times, speeds, build and CPU by fixed texts; cells keep their width."""
    if form == "md":
        text = re.sub(rf" *{NUMBER} \|$", " # |", text, flags=re.MULTILINE)
        return re.sub(r"build: .*", "build: #", text)
    text = re.sub(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", "TIME", text)
    if form in ("csv", "sql"):
        quote = '"' if form == "csv" else "'"
        cells = rf"{quote}[^{quote}]*{quote}"
        text = re.sub(rf"{quote}TIME{quote}(, ?|,){cells}(, ?|,){cells}(, ?|,){cells}(, ?|,){cells}", "TIMES", text)
        text = re.sub(rf"VALUES \({cells}, {cells}", "VALUES (BUILD", text)
        text = re.sub(r"^\"[^\"]*\",\"[^\"]*\"", "BUILD", text, flags=re.MULTILINE)
        return re.sub(rf"{quote}(AMD EPYC|{re.escape(cpu())}){quote}", "CPU", text)
    text = re.sub(r'("build_commit": ").*"', r'\1#"', text)
    text = re.sub(r'("cpu_info": ").*"', r'\1#"', text)
    text = re.sub(r'("(build_number|avg_ns|stddev_ns)": )\d+', r"\1#", text)
    text = re.sub(r'("(avg_ts|stddev_ts)": )\d+\.\d{6}(,)', r"\1#\3", text)
    return re.sub(r'("samples_(ns|ts)": \[) [\d.e+]+(, [\d.e+]+)* \]', r"\1 # ]", text)


def cpu() -> str:
    from ikpy.tools.machine import cpu_name

    return cpu_name()


@pytest.mark.parametrize(
    ("name", "form", "line"),
    [
        ("lists", "md", "-m MODEL -p 16,32 -n 4 -t 1,2 -fa 0,1 -ub 16,512 -r 1"),
        ("lists-repeat", "md", "-m MODEL -m Q4KM.gguf -p 16 -p 32 -n 0 -r 1 -t 2"),
        ("gp", "md", "-m MODEL -p 0 -n 0 -gp 64,8 -gp 128,8 -r 1 -t 2"),
        ("pg", "md", "-m MODEL -p 0 -n 0 -pg 64,8 -r 1 -t 2"),
        (
            "mqkv-muge-thp-rcache",
            "md",
            "-m MODEL -p 32 -n 4 -muge 1 -thp 0 -rcache 1 -ger 1 -fmoe 0,1 -r 1 -t 2",
        ),
        ("lists-csv", "csv", "-m MODEL -p 16,32 -n 4 -ctk f16,q8_0 -mla 1,3 -r 1 -o csv -t 2"),
        ("o-csv", "csv", "-m MODEL -p 64 -n 8 -r 2 -t 2 -o csv"),
        ("o-json", "json", "-m MODEL -p 64 -n 8 -r 2 -t 2 -o json"),
        ("o-sql", "sql", "-m MODEL -p 64 -n 8 -r 2 -t 2 -o sql"),
    ],
)
def test_output_has_the_form_of_the_golden_capture(name, form, line):
    output, _ = run_bench(line)
    golden = (GOLDEN / f"llama-bench-{name}.out").read_text()
    if name == "mqkv-muge-thp-rcache":
        # Merging made another tensor list there.
        golden = golden.replace("33.79 MiB |    17.71 M", "27.79 MiB |    14.56 M")
    assert without_times(output, form).splitlines() == without_times(golden, form).splitlines()


def test_json_lines():
    output, _ = run_bench("-p 8 -n 4 -r 3 -o jsonl -t 1")
    rows = [json.loads(line) for line in output.splitlines()]
    assert [row["test"] for row in rows] == ["pp8", "tg4"]
    assert len(rows[0]["samples_ns"]) == 3
    golden = json.loads((GOLDEN / "llama-bench-o-json.out").read_text())
    assert list(rows[0]) == list(golden[0])
    assert [type(value) for value in rows[0].values()] == [type(value) for value in golden[0].values()]


def test_markdown_cells_of_every_optional_column():
    line = "-p 8 -n 0 -r 1 -t 2 -b 64 -ctk q8_0 -ctv q8_0 -mg 1 -sm graph -nkvo 1 -fa 0 -mla 1 -amb 512 -gr 0 -ser 6,1"
    output, _ = run_bench(line + " -ts 3/1/0 -mmp 0 -embd 1 -rtr 1 -ot exps=CPU --print-overrides 1 -no-fug 1")
    head, rule, row = output.splitlines()[:3]
    assert head == (
        "| model                          |       size |     params | backend    | threads | n_batch | type_k | type_v "
        "|   main_gpu |    sm |          nkvo | fa | mla |   amb | gr |        ser | ts           | mmap |       embd "
        "| ot              | rtr | no-fug |          test |              t/s |"
    )
    assert [len(cell) for cell in head.split("|")] == [len(cell) for cell in rule.split("|")]
    assert (
        "|       2 |      64 |   q8_0 |   q8_0 |          1 | graph |             1 |  0 |   1 |   512 |  0 | "
        "       6,1 | 3.00/1.00    |    0 |          1 | exps=CPU        |   1 |      1 |           pp8 |"
    ) in row


def test_order_of_tests():
    line = "-m A -m B -p 1,2 -n 3 -pg 4,5 -gp 6,7 -fa 1,0 -t 1,2 -ctk f16,q8_0"
    labels = [
        (test.model, test.values["type_k"], test.values["flash_attn"], test.n_threads, test.label)
        for test in bench_tests(command(line).params(lambda: ""))
    ]
    expected = [
        (model, type_k, fa, threads, label)
        for model in "AB"
        for type_k in ("f16", "q8_0")
        for fa in (True, False)
        for threads in (1, 2)
        for label in ("pp1", "pp2", "tg3", "pp4+tg5", "tg7@pp6")
    ]
    assert labels == expected


def test_procedure():
    output, engine = run_bench("-p 5 -n 2 -b 3 -r 2 -t 1 -gp 3,2")
    assert output.count(" CPU ") == 3
    assert engine.loads == ["MODEL"]
    positions = [(len(tokens), position) for tokens, position in engine.calls]
    prompt = [(1, 0), (3, 0), (2, 3), (3, 0), (2, 3)]
    generation = [(1, 0)] + 2 * [(1, 0), (1, 1)]
    depth = [(1, 0), (1, 0)] + 2 * [(3, 0), (1, 3), (1, 4)]
    assert positions == prompt + generation + depth
    assert engine.clears == 3 * 3
    assert engine.calls[0][0] == [7], "a prompt begins with BOS"
    _, engine = run_bench("-p 5 -n 0 -r 1 -w 0 -t 1")
    assert len(engine.calls) == 1


def test_depth(capfd):
    output, engine = run_bench("-p 4 -n 2 -b 3 -d 0,5 -r 1 -w 0 -t 1 -pg 1,1")
    assert re.findall(r"\| +(\S[^|]*?) \| +\d+\.\d+ ±", output) == [
        "pp4", "tg2", "pp1+tg1", "pp4 @ d5", "tg2 @ d5", "pp1+tg1 @ d5",
    ]  # fmt: skip
    positions = [(len(tokens), position) for tokens, position in engine.calls]
    shallow = [(3, 0), (1, 3), (1, 0), (1, 1), (1, 0), (1, 1)]
    filled = [(3, 0), (2, 3)]
    assert positions == [*shallow, *filled, (3, 5), (1, 8), *filled, (1, 5), (1, 6), *filled, (1, 5), (1, 6)]
    assert engine.calls[8][0] != [7], "only a text begins with BOS"
    assert program("bench -p 8 -n 2 -d 40 -r 3 -t 1 -o jsonl --progress --no-warmup") == 0
    out, err = capfd.readouterr()
    rows = [json.loads(line) for line in out.splitlines()]
    assert [(row["test"], row["n_depth"]) for row in rows] == [("pp8 @ d40", 40), ("tg2 @ d40", 40)]
    assert "bench: test 2/2: tg2 @ d40" in err


def test_repetitions_at_a_depth_keep_what_is_there():
    params = command("-p 2 -n 0 -d 6 -r 3 -w 0 -t 1").params(lambda: "MODEL")
    for kept, filled in ((6, 1), (0, 3)):
        engine = FakeEngine(params)
        kept_at: list[int] = []
        kv = SimpleNamespace(clear=lambda: None, rewind=lambda seq, n, kept=kept: kept, keep_checkpoint=kept_at.append)
        engine.context = lambda model, test, kv=kv: SimpleNamespace(kv=kv)
        Runner(params, engine).run(next(bench_tests(params)))
        assert [position for _, position in engine.calls].count(0) == filled
        assert [position for _, position in engine.calls].count(6) == 3
        assert len(kept_at) == filled


def test_threads_of_a_test():
    params = command("-tgb 2,8;3,9 -t 4 -p 1 -n 1").params(lambda: "")
    assert [(test.label, test.n_threads) for test in bench_tests(params)] == [
        ("pp1", 8), ("tg1", 2), ("pp1", 9), ("tg1", 3), ("pp1", 4), ("tg1", 4),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("-p 512,1024 -p 7", "n_prompt", [512, 1024, 7]),
        ("-p 1-3,128-512*2", "n_prompt", [1, 2, 3, 128, 256, 512]),
        ("-d 0-1000+500", "n_depth", [0, 500, 1000]),
        ("-t 2-3", "threads", [(2, 2), (3, 3)]),
        ("-ngl all,7", "n_gpu_layers", [999, 7]),
        ("-dev CUDA0/cuda1", "devices", ("CUDA0", "CUDA1")),
        ("--no-warmup", "warmup", False),
        ("-mla 2,3", "mla_attn", [2, 3]),
        ("-fa -fmoe", "flash_attn", [True]),
        ("-fa on,off", "flash_attn", [True, False]),
        ("-ser 6,1;7,0.5", "ser", [(6, 1.0), (7, 0.5)]),
        ("-ts 1/2;3,4", "tensor_split", [(1.0, 2.0, 3.0), (4.0,)]),
        ("--n_prompt 3", "n_prompt", [3]),
        ("-rtr 0,1", "repack", [False, True]),
        ("-rtr -fa", "repack", [True]),
        ("-rtr 1 -nr", "repack", [True, False]),
        ("-lm auto,none,mmap,mlock,mmap+mlock,dio", "use_mmap", [True, False, True, False, True, False]),
        ("--defer-experts -p 1", "defer_experts", True),
        ("-lzm auto -lzm on", "lazy_mode", "on"),
        ("-ot a=CPU,b=CPU -ot c=CPU", "override_tensor", "a=CPU;b=CPU;c=CPU"),
        ("-ot a=CPU;b{1,2}=CPU", "override_tensor", "a=CPU;b{1,2}=CPU"),
    ],
)
def test_option_values(text, name, value):
    assert command(text).values[name] == value


def test_shares_that_were_written_as_tests_are_remarked_on() -> None:
    hint = "-ts: 3 tests with one share each; the shares of a test have slashes between: 38/26/24"
    assert hint in command("-ts 38,26,24").warnings
    assert not any(
        "shares" in line for text in ("-ts 38/26/24", "-ts 3/1,1/1", "-ts 1") for line in command(text).warnings
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("-gp 64", "invalid parameter for argument: -gp"),
        ("-ctk zzz", "invalid parameter for argument: -ctk"),
        ("-p", "invalid parameter for argument: -p"),
        ("-o xml", "invalid parameter for argument: -o"),
        ("--nope", "invalid parameter for argument: --nope"),
        ("--n-prompts 3", "(did you mean --n-prompt?)"),
        ("-p 1,x", "invalid parameter for argument: -p"),
        ("-p 8-4", "first-last"),
        ("-p 8-16*1", "first-last*factor"),
        ("-p -5", "invalid parameter for argument: -p"),
        ("-pg 8,-1", "invalid parameter for argument: -pg"),
        ("-pg 0,0", "invalid parameter for argument: -pg (no tokens to measure in '0,0')"),
        ("-gp 64,0", "invalid parameter for argument: -gp (no tokens to generate in '64,0')"),
        ("-p 1-99999999999999999999*2", "invalid parameter for argument: -p (expected at most 2147483647"),
    ],
)
def test_errors(line, message):
    with pytest.raises(UsageError) as caught:
        command(line)
    assert message in str(caught.value)


def test_warnings():
    no_gpu = "no effect: -ngl (no usable CUDA device)"
    assert command("-ngl 99 -fmoe 1 -fa 1 -mmp 1").warnings == [no_gpu]
    assert command("-fmoe 0").warnings == ["no effect: -fmoe (the graph compiler always fuses)"]
    assert command("-ger 0,1").warnings == ["-ger: takes one value, using 0"]


def test_named_devices_are_left_out_where_there_is_none():
    read = command("-dev CUDA0")
    assert read.warnings == ["no effect: -dev (no usable CUDA device)"]
    assert read.params(lambda: "MODEL").devices == ()


@pytest.mark.skipif(not (SHARED / "golden/outputs/options.json").exists(), reason="golden option lists not found")
def test_all_golden_spellings_are_known():
    groups = json.loads((SHARED / "golden/outputs/options.json").read_text())["options"]["llama-bench"]
    assert not {name for group in groups for name in group} - set(BY_NAME) - {"-h", "--help"}


def test_statistics():
    assert sample_deviation([1.0]) == 0
    assert sample_deviation([1.0, 3.0]) == pytest.approx(2**0.5)


def test_program_on_the_bundled_model(capfd):
    assert program("bench -p 8 -n 2 -r 1 -t 1 -pg 4,2 -oe jsonl -ctk q8_0") == 0
    out, err = capfd.readouterr()
    rows = [json.loads(line) for line in err.splitlines() if line.startswith("{")]
    assert [row["test"] for row in rows] == ["pp8", "tg2", "pp4+tg2"]
    assert all(row["avg_ts"] > 0 for row in rows)
    assert rows[0]["model_type"] == "deepseek2 ?B F16"
    assert len(out.splitlines()) == 2 + 3 + 2
    assert "using the bundled" in err


def test_missing_model(capfd):
    assert program("bench -m NOFILE.gguf -p 8 -n 0 -r 1 -t 1") == 1
    out, err = capfd.readouterr()
    assert len(out.splitlines()) == 2
    assert err.startswith("error: failed to load model 'NOFILE.gguf'")


def test_no_test_at_all(capfd):
    assert program("bench -p 0 -n 0 -o json -t 1") == 0
    out, err = capfd.readouterr()
    assert json.loads(out) == []
    assert "warning: nothing is measured: -p and -n are 0" in err.splitlines()


def test_warnings_of_models_come_once(capfd):
    assert program("bench -p 4 -n 0 -r 1 -t 1 -ot exps=CUDA7 -ger 1 -rtr 0,1") == 0
    out, err = capfd.readouterr()
    assert out.count("pp4") == 2
    assert [line for line in err.splitlines() if line.startswith("warning: ")] == [
        "warning: -ot exps=CUDA7: there is no device CUDA7; the rule is ignored",
        "warning: -ger has no effect: the model has no groups of experts",
    ]


def test_verbose_shows_models_and_contexts(capfd):
    assert program("bench -p 4 -n 1 -r 1 -t 1 -v") == 0
    out, err = capfd.readouterr()
    assert len(out.splitlines()) == 2 + 2 + 2, "the table has standard output to itself"
    for line, count in (
        ("llm_load_print_meta: arch ", 1),
        ("llama_model_loader: - type  f16:   43 tensors", 1),
        ("llama_init_from_model: KV self size ", 2),
        ("llama_init_from_model: graph splits = 1", 2),
    ):
        assert sum(found.startswith(line) for found in err.splitlines()) == count, line
