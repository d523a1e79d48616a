"""`ikpy cli` on the bundled model: recorded texts, interactive use, conversations, prompt cache, errors."""

from __future__ import annotations

import errno
import io
import itertools
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from ikpy.cli import main
from ikpy.cli.console import Console, Interrupt
from ikpy.engine.sampling import Sampler
from tests.cpu.models.bigram_model import BigramContext, ByteVocab, random_table
from tests.shared import ROOT

OLD_MAN = "The old man looked at"
GREEDY = " the room, and the\nsame, and the old gentleman, and the other, and the\nsame of"
SCHEMA = (
    '{"type":"object","properties":{"a":{"type":"boolean"},"b":{"enum":["x","y"]}},'
    '"required":["a","b"],"additionalProperties":false}'
)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Runs `ikpy cli` with greedy defaults; returns status, standard output and standard error."""

    def run(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        status = main(["cli", "-c", "512", "-t", "1", "-n", "24", "--temp", "0", "-s", "1", *arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


RECORDED = [
    (["-p", OLD_MAN], OLD_MAN + GREEDY),
    (["-p", OLD_MAN, "--no-display-prompt"], GREEDY),
    (["-p", "", "-n", "8"], "t, and the\nsame of"),
    (["-p", r"one\ntwo\tthree \x41"], "one\ntwo\tthree Air Slide, and the parks of the\nsame, and the parks of the p"),
    (
        ["-p", r"one\ntwo", "--no-escape"],
        r"one\ntwo" + "is, and the powers of the powers of the powers of the park, and the page of",
    ),
    (
        ["-p", "<|user|>hi<|end|><|assistant|>", "-sp"],
        "<|begin_of_text|><|user|>hi<|end|><|assistant|>, and the\nsame, and the parks of the parks of the\nsame, and",
    ),
    (["-p", OLD_MAN, "-l", "11+50", "-n", "4"], OLD_MAN + ",,,,"),
    (["-p", "Answer:", "--grammar", 'root ::= " " ("yes" | "no") "."'], "Answer: no."),
    (
        ["-p", "JSON:", "-n", "60", "-j", SCHEMA],
        'JSON:{\n"a": false, "b"\n\n : "y"\n\n                    }\n\n             ',
    ),
    (
        ["-p", OLD_MAN, "--temp", "1", "--top-k", "1", "--dry-multiplier", "50", "--dry-allowed-length", "1"],
        OLD_MAN + " the room, and the\nsame, the old gentleman, who had been a very little more than\nthe world",
    ),
    (
        ["-p", OLD_MAN, "--temp", "1", "--top-k", "1", "--repeat-penalty", "5"],
        OLD_MAN + " the room, and\nthe other day of his own mind. He had not been a very\nmanner to be",
    ),
    (["-p", "x", "-n", "0"], ""),
]


@pytest.mark.parametrize(("arguments", "text"), RECORDED)
def test_text_is_the_recorded_one(cli, arguments: list[str], text: str) -> None:
    status, out, _ = cli(*arguments)
    assert (status, out) == (0, text)


def test_log_lines(cli) -> None:
    _, _, err = cli("-p", "The old man", "--verbose-prompt", "-n", "4")
    for line in (
        "Log start",
        "main: seed  = 1",
        "main: prompt: 'The old man'",
        "main: number of tokens in prompt = 4",
        "  4090 -> '<|begin_of_text|>'",
        "   451 -> ' man'",
        "\ttop_k = 40, tfs_z = 1.000, top_p = 0.950, min_p = 0.050, typical_p = 1.000, temp = 0.000",
        "generate: n_ctx = 512, n_batch = 2048, n_predict = 4, n_keep = 1",
        "Log end",
    ):
        assert line in err.splitlines(), line
    assert "\nmain: prompt eval time = " in err and " ms /     4 tokens (" in err
    _, _, err = cli("-p", "Answer:", "--grammar", 'root ::= " no."')
    assert "\n [end of text]\n" in err
    _, _, err = cli("-p", "x", "-n", "0")
    assert "llama_print_timings: prompt eval time = " in err
    assert "generate" not in cli("-p", "x", "-n", "1", "--log-disable")[2]


def test_drafts_leave_the_text_as_it_is(cli, tmp_path: Path) -> None:
    """Statistics go to the log; a lookup cache is written and helps the next run."""
    options = ["-p", OLD_MAN, "--spec-type", "ngram-cache", "-lcd", str(tmp_path / "cache.bin"), "--draft", "6"]
    rates = []
    for _ in range(2):
        status, out, err = cli(*options)
        assert status == 0 and out.rstrip("\n") == OLD_MAN + GREEDY
        assert "statistics ngram_cache: #calls = " in err
        rates.append(float(err.split("draft acceptance rate = ")[1].split()[0]))
    assert rates[1] > max(rates[0], 0.5)
    status, out, err = cli("-p", OLD_MAN, "--spec-stage", "suffix:n_max=4,pattern_len=1", "-draft", "p_min=0.1")
    assert status == 0 and out.rstrip("\n") == OLD_MAN + GREEDY and "statistics suffix: " in err


def test_a_lookup_cache_that_cannot_be_written(cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line says so behind the answer."""
    from ikpy.engine import ngram_cache

    def full(path: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(ngram_cache, "replacing", full)
    status, out, err = cli("-p", OLD_MAN, "--spec-type", "ngram-cache", "-lcd", str(tmp_path / "cache.bin"))
    assert status == 0 and out.rstrip("\n") == OLD_MAN + GREEDY
    said = [line for line in err.splitlines() if "lookup cache" in line]
    assert said == [f"warning: cannot write lookup cache '{tmp_path}/cache.bin': No space left on device"]
    assert "statistics ngram_cache: #calls = " in err


def test_prompt_file_loses_one_newline(cli, tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("Once upon a time,\nthere was\n")
    _, out, _ = cli("-f", str(path), "-n", "6")
    assert out == "Once upon a time,\nthere was a very good deal of the"


def test_reverse_prompt_stops(cli) -> None:
    status, out, _ = cli("-p", OLD_MAN, "-r", "same")
    assert (status, out) == (0, OLD_MAN + " the room, and the\nsame")


@pytest.mark.parametrize(
    ("stop", "text"),
    [("roo", " the room"), ("room, an", " the room, and"), (r"e\nsa", " the room, and the\nsame")],
)
def test_reverse_prompt_stops_within_a_token(cli, stop: str, text: str) -> None:
    """The token is written as a whole."""
    status, out, _ = cli("-p", OLD_MAN, "-r", stop)
    assert (status, out) == (0, OLD_MAN + text)


def test_reverse_prompt_stops_in_turns_and_chats(cli) -> None:
    _, out, _ = cli("-i", "-p", OLD_MAN, "-r", "roo", stdin=" and/\n")
    assert out.startswith(OLD_MAN + " the room and/\n")
    _, out, _ = cli("-st", "-p", OLD_MAN, "--no-display-prompt", "-r", "sa")
    assert out == "ing, and the\nsame\n"


def test_an_empty_reverse_prompt_stops_nothing(cli) -> None:
    status, out, err = cli("-p", OLD_MAN, "-r", "")
    assert (status, out) == (0, OLD_MAN + GREEDY)
    assert "warning: -r: an empty text stops nothing\n" in err


def test_interactive_turns_until_the_input_ends(cli) -> None:
    status, out, err = cli("-i", "-r", "the", "-p", "The old man", stdin=" and then\n\nmore/\n")
    assert status == 0 and out.startswith("The old man of the and then\n") and "more/\n" in out
    assert "== Running in interactive mode. ==" in err and "Reverse prompt: 'the'" in err


def test_interactive_continues_as_if_uninterrupted(cli) -> None:
    """Returning control with an empty line must leave no trace in the text."""
    _, out, _ = cli("-i", "-p", OLD_MAN, "-n", "12", stdin="\n")
    assert out.replace("the old\n gentleman", "the old gentleman") == OLD_MAN + GREEDY


def test_conversation(cli) -> None:
    status, out, err = cli("-cnv", "-p", "You are kind.", "-n", "8", stdin="Hello\nHow are you?\n")
    assert status == 0 and out.startswith("\n> Hello\n") and out.count("\n> ") == 3
    assert "You are kind." not in out
    example = "<|system|>You are a helpful assistant<|end|><|user|>Hello<|end|><|assistant|>Hi there<|end|>"
    assert f"main: chat template example:\n{example}<|user|>How are you?<|end|><|assistant|>\n" in err
    _, first, _ = cli("-cnv", "-p", "You are kind.", "-n", "8", stdin="Hello\n")
    assert out.startswith(first.rstrip("> ")), "the first answer must not depend on what follows"


def test_one_question(cli, tmp_path) -> None:
    status, out, _ = cli("-st", "-p", "Hello", "-sys", "You are kind.", "-n", "8", stdin="more\nand more\n")
    assert status == 0 and out.startswith("\n> Hello\n") and out.endswith("\n")
    assert out.count("> ") == 1 and "more" not in out
    _, chat, _ = cli("-cnv", "-p", "You are kind.", "-n", "8", stdin="Hello\n")
    assert chat.startswith(out.rstrip("\n")), "the prompt must be that of a chat"
    (tmp_path / "system").write_text("You are kind.\n")
    status, from_file, _ = cli("-sysf", str(tmp_path / "system"), "-n", "8", stdin="Hello\n")
    assert status == 0 and from_file == chat
    _, plain, _ = cli("-no-cnv", "-sys", "You are kind.", "-p", OLD_MAN, "-n", "4")
    assert plain.startswith(OLD_MAN)


def test_commands_of_conversations(cli) -> None:
    chat = ("-cnv", "-p", "You are kind.", "-n", "8")
    status, out, err = cli(*chat, stdin="/regen\nHello\n/regen\n/clear\n/regen\nHello\n/exit\nHow are you?\n")
    assert status == 0 and "/regen answers again" in err
    answer = cli(*chat, stdin="Hello\n")[1].removeprefix("\n> Hello\n").rstrip("\n> ")
    assert out.count(answer) == 3 and out.count("The conversation starts anew.") == 1
    assert out.endswith("\n> /exit\n") and "How are you?" not in out


def test_conversation_drops_old_turns_when_full(cli) -> None:
    lines = "".join(f"This is message number {i} of a long conversation about the sea.\n" for i in range(14))
    status, out, _ = cli("-cnv", "-c", "256", "-n", "12", stdin=lines)
    assert status == 0 and out.count("\n> ") == 15


def test_a_message_that_is_too_long_leaves_the_conversation(cli) -> None:
    status, out, err = cli("-cnv", "-c", "256", "-n", "8", stdin=f"Hello\n{'word ' * 400}\nAnd you?\n")
    assert status == 0 and err.count("error: message is too long (") == 1
    _, without, _ = cli("-cnv", "-c", "256", "-n", "8", stdin="Hello\nAnd you?\n")
    assert out.endswith(without[without.index("\n> And you?") :])
    assert cli("-st", "-c", "256", "-p", "word " * 400)[0] == 1


def program(*arguments: str, text: bytes = b"", **environment: str) -> subprocess.CompletedProcess[bytes]:
    """`ikpy cli` as a process, with the given bytes as its input."""
    line = [sys.executable, "-m", "ikpy", "cli", "-t", "1", "-n", "4", "--temp", "0", *arguments]
    return subprocess.run(
        line, input=text, capture_output=True, cwd=ROOT, env={**os.environ, **environment}, timeout=300, check=False
    )


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_any_locale(encoding) -> None:
    result = program("-p", "née 🦙", PYTHONIOENCODING=encoding)
    assert result.returncode == 0, result.stderr[-300:]
    assert result.stdout.startswith("née ?".encode("latin-1") if encoding == "latin-1" else "née 🦙".encode())


def test_input_that_is_no_text() -> None:
    result = program("-cnv", text=b"\xff\xfehello\n")
    assert result.returncode == 0, result.stderr[-300:]
    assert result.stdout.startswith(b"\n> ??hello\n")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-"])
def test_closed_streams(closed, tmp_path) -> None:
    """As services and scheduled jobs may have them."""
    command = f'"$0" -m ikpy cli -cnv -sys x -n 1 -t 1 -p Hello {closed}'
    result = subprocess.run(
        ["sh", "-c", command, sys.executable], capture_output=True, cwd=ROOT, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr[-300:]
    assert result.stdout.startswith(b"\n> Hello\n") or (closed == ">&-" and result.stdout == b"")
    assert b"internal error" not in result.stderr and (b"Log end" in result.stderr or closed == "2>&-")


def test_lines_of_terminals_may_be_long() -> None:
    """A terminal's own lines end at 4,095 characters; edited ones do not."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execv(sys.executable, [sys.executable, "-m", "ikpy", "cli", "-cnv", "-c", "512", "-t", "1", "--log-disable"])
    seen = b""
    sent = ended = False
    deadline = time.monotonic() + 300
    while not ended and time.monotonic() < deadline:
        if not select.select([terminal], [], [], 1.0)[0]:
            continue
        try:
            seen += os.read(terminal, 65536)
        except OSError:  # the program ended
            ended = True
        if not sent and b"\n> " in seen:
            time.sleep(0.5)  # input before the prompt's own would be the terminal's
            os.write(terminal, b"w" * 6000 + b"\n")
            sent = True
        elif b"too long" in seen and seen.rstrip().endswith(b"\n>"):
            time.sleep(0.5)
            os.write(terminal, b"\x04")
    if not ended:
        os.kill(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(terminal)
    n_tokens = re.search(rb"message is too long \((\d+) tokens", seen)
    assert n_tokens and int(n_tokens[1]) >= 6000, seen[-300:]
    assert status == 0, seen[-300:]


def test_full_context_ends_with_a_reason(cli) -> None:
    status, _, err = cli("-p", OLD_MAN, "-c", "256", "-n", "300", "--no-context-shift")
    assert status == 0 and "main: the context of 256 tokens is full and context shift is off" in err


def test_turns_end_where_the_context_is_full(cli) -> None:
    """Without context shift, be it that latent caches have none, -i ends as a plain run does: no error, with times."""
    options = ("-i", "-c", "256", "-n", "150", "-p", OLD_MAN, "--ignore-eos")
    lines = " and then\nmore\nstill more\n"
    status, out, err = cli(*options, stdin=lines)
    assert status == 0 and "and then\n" in out and "more" not in out
    assert "this model's cache cannot be shifted: the text ends when the 256 tokens of the context are used\n" in err
    assert "main: no room for another turn, since this model's cache cannot be shifted: raise the context" in err
    assert err.endswith("Log end\n") and "main:       total time" in err and "error" not in err
    _, _, err = cli(*options, "--no-context-shift", stdin=lines)
    assert "no room for another turn, since context shift is off" in err


def test_a_text_longer_than_what_is_left_is_asked_for_again(cli) -> None:
    status, out, err = cli("-i", "-c", "256", "-n", "100", "-p", OLD_MAN, stdin=" word" * 200 + "\n short\n")
    assert status == 0 and out.count("short") == 1
    assert re.search(r"error: input is too long \(20\d tokens, max 14\d\)", err)


def test_an_error_does_not_stand_behind_the_text(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    sampled = Sampler.sample
    counts = itertools.count()

    def sample(self, logits, known=None):
        return sampled(self, logits if next(counts) < 3 else np.full_like(logits, np.nan), None)

    monkeypatch.setattr(Sampler, "sample", sample)
    status, out, err = cli("-p", OLD_MAN)
    assert (status, out) == (1, OLD_MAN + GREEDY[: len(out) - len(OLD_MAN)]) and len(out) > len(OLD_MAN)
    before, error = err.split("error: the model's logits are not numbers")
    assert before.endswith("\n\n") and error.count("\n") == 1


def test_prompt_cache(cli, tmp_path: Path) -> None:
    path = str(tmp_path / "cache.bin")
    _, out, err = cli("-p", OLD_MAN, "--prompt-cache", path)
    assert out == OLD_MAN + GREEDY and "session file does not exist, will create." in err
    _, out, err = cli("-p", OLD_MAN, "--prompt-cache", path)
    assert out == OLD_MAN + GREEDY
    assert "main: loaded a session with prompt size of 6 tokens\n" in err
    assert "main: session file has exact match for prompt!\n" in err and "/     1 tokens" in err
    _, out, _ = cli("-p", OLD_MAN, "--prompt-cache", path, "--prompt-cache-all")
    _, out, err = cli("-p", OLD_MAN + GREEDY + " the", "-n", "4", "--prompt-cache", path, "--prompt-cache-ro")
    reference = cli("-p", OLD_MAN + GREEDY + " the", "-n", "4")[1]
    assert out == reference and "main: loaded a session with prompt size of 29 tokens" in err
    status, _, err = cli("-p", OLD_MAN, "--prompt-cache", path, "-ctk", "q8_0")
    assert status == 1 and "another cache type" in err
    Path(path).write_bytes(Path(path).read_bytes()[:-5])
    assert "is damaged" in cli("-p", OLD_MAN, "--prompt-cache", path)[2]
    Path(path).write_bytes(b"something else")
    assert "is not a session file" in cli("-p", OLD_MAN, "--prompt-cache", path)[2]


def test_prompt_cache_of_a_conversation(cli, tmp_path: Path) -> None:
    """The file holds system message and first message; another first message goes on behind the system message."""
    path = tmp_path / "cache.bin"
    arguments = ["-cnv", "-n", "4", "-p", "You answer in the words of the sea. " * 4]
    _, plain, _ = cli(*arguments, stdin="Hello\nAnd you?\n")
    _, out, err = cli(*arguments, "--prompt-cache", str(path), stdin="Hello\nAnd you?\n")
    assert out == plain and "session file does not exist, will create." in err
    saved = path.read_bytes()
    for message, line in (("Hello", "has exact match for prompt!"), ("Who are you?", "matches ")):
        _, out, err = cli(*arguments, "--prompt-cache", str(path), "--prompt-cache-ro", stdin=f"{message}\n")
        assert out == cli(*arguments, stdin=f"{message}\n")[1] and err.count(f"main: session file {line}") == 1
    assert path.read_bytes() == saved


def test_input_longer_than_the_context_leaves_the_text(cli) -> None:
    arguments = ("-i", "-p", OLD_MAN, "-n", "4", "-c", "256")
    status, out, err = cli(*arguments, stdin="the sea " * 300 + "\n, said/\n")
    assert status == 0 and err.count("error: input is too long (") == 1
    without = cli(*arguments, stdin=", said/\n")[1]
    assert out.endswith(without[without.index(", said") :])


@pytest.mark.parametrize(("arguments", "message"), [
    (["-p", "x", "--grammar", 'root ::= ("yes"'], "error parsing grammar: expecting ')' at the end"),
    (["-p", "x", "-j", '{"type":"what"}'], "JSON schema conversion failed: root: unknown type"),
    (["-m", "missing.gguf", "-p", "x"], "missing.gguf"),
    (["-p", "x", "--grammar", 'root ::= "a"', "-j", "{}"], "exclude each other"),
    (["-p", "x", "-l", "99999+1"], "the vocabulary has tokens 0 to 4095"),
    (["-p", "word " * 600], "prompt is too long (6"),
    (["-cnv", "--chat-template", "nosuch"], "the supplied chat template is not supported: nosuch"),
])  # fmt: skip
def test_errors_are_one_line(cli, arguments: list[str], message: str) -> None:
    status, out, err = cli(*arguments)
    last = [line for line in err.splitlines() if line.startswith("error: ")]
    assert status == 1 and out == "" and len(last) == 1 and message in last[0]


class HalfCharacters(ByteVocab):
    """Vocabulary of single bytes with a stream decoder."""

    def stream_decoder(self, special: bool = False):
        from ikpy.vocab.stream import StreamDecoder

        return StreamDecoder(lambda token: bytes([token]))


def test_console_never_writes_half_a_character() -> None:
    out = io.StringIO()
    console = Console(HalfCharacters(), out=out)
    pieces = [console.token(byte) for byte in "é😀a".encode()]
    assert pieces == ["", "é", "", "", "", "😀", "a"] and out.getvalue() == "é😀a"
    console.token(0xF0)
    assert console.end() == "\ufffd"


@pytest.mark.parametrize(("typed", "multiline", "text"), [
    ("one\ntwo\n", False, "one\n"),
    ("one\\\ntwo\n", False, "one\ntwo\n"),
    ("one/\n", False, "one"),
    ("one\ntwo\\\n", True, "one\ntwo\n"),
    ("one\ntwo/\n", True, "one\ntwo"),
    ("", False, None),
    ("last", False, "last\n"),
])  # fmt: skip
def test_console_input(typed: str, multiline: bool, text: str | None) -> None:
    console = Console(HalfCharacters(), out=io.StringIO(), source=io.StringIO(typed), multiline=multiline)
    assert console.read() == text


def test_first_interrupt_is_noted_second_ends() -> None:
    interrupt = Interrupt()
    assert threading.current_thread() is threading.main_thread()
    with interrupt.watched():
        signal.raise_signal(signal.SIGINT)
        assert interrupt.pressed
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with interrupt.watched():
        assert not interrupt.pressed


def test_context_shift_keeps_the_beginning() -> None:
    from ikpy.tools.generation import ContextFullError, GrowingSequence

    context = BigramContext(random_table(), n_ctx=32, n_batch=8)
    context.kv.can_shift = True
    sequence = GrowingSequence(context, n_keep=4)
    tokens = list(range(30))
    sequence.feed(tokens)
    dropped: list[int] = []
    sequence.on_shift = dropped.append
    sequence.feed([100, 101, 102])
    assert dropped == [13] and sequence.tokens == [*tokens[:4], *tokens[17:], 100, 101, 102]
    assert [context.kv.cells[0][p] for p in range(len(sequence.tokens))] == sequence.tokens
    assert sequence.rewind([0, 1, 2, 3, 17, 99]) == 5 and sequence.tokens == [0, 1, 2, 3, 17]
    assert sequence.rewind([0, 1, 2, 3, 17]) == 4, "the last token is evaluated again for its logits"
    context.n_batch = 32
    sequence.feed(range(4, 24))
    sequence.feed(range(50, 70))
    assert dropped == [13, 12], "more than half where the new tokens need it"
    assert sequence.tokens == [*tokens[:4], *range(16, 24), *range(50, 70)]
    context.kv.can_shift = False
    with pytest.raises(
        ContextFullError, match=r"context of 32 tokens is full and this model's cache cannot be shifted"
    ):
        sequence.feed(list(range(40)))


def test_adapters_and_control_vectors_change_the_text(cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    from ikpy.engine import model
    from tests.cpu.models.test_adapters import write_adapter, write_directions

    rows = np.random.default_rng(1).normal(0, 40, (2, 256)).astype(np.float32)
    path = write_directions(tmp_path / "vector.gguf", {1: rows[0], 2: rows[1]})
    texts = {}
    for options in ((), ("--control-vector", str(path)), ("--control-vector-scaled", str(path), "0")):
        status, out, err = cli("-p", OLD_MAN, *options)
        assert status == 0, err
        where = "no layer: nothing is changed" if "0" in options else "layers 1, 2"
        assert (f"control vector: added to {where}" in err) == bool(options), err
        texts[options[:1]] = out.rstrip("\n")
    assert texts[()] == texts["--control-vector-scaled",] == OLD_MAN + GREEDY
    assert texts["--control-vector",] != OLD_MAN + GREEDY
    out_of_range = ("--control-vector", str(path), "--control-vector-layer-range", "900", "999")
    assert cli("-p", OLD_MAN, *out_of_range)[1].rstrip("\n") == OLD_MAN + GREEDY
    status, _, err = cli("-p", OLD_MAN, "--lora", str(path))
    assert status == 1 and "not a LoRA adapter: it has no key general.type ('adapter' in adapters)" in err
    status, _, err = cli("-p", OLD_MAN, "-m", str(path))
    assert status == 1 and "this is no model but a control vector" in err
    adapter = np.random.default_rng(2).normal(0, 1, (2, 4, 256)).astype(np.float32)
    pair = adapter[0], np.tile(adapter[1].T, (16, 1))
    path = write_adapter(tmp_path / "a.gguf", "deepseek2", {"output": pair}, 8)
    for options in (("--lora", str(path)), ("--lora", str(path), "--lora-init-without-apply")):
        status, out, err = cli("-p", OLD_MAN, *options)
        is_off = len(options) > 2
        assert f"lora: {path}: 1 weights adapted, rank 4, scale {0 if is_off else 1}\n" in err
        assert status == 0 and (out.rstrip("\n") == OLD_MAN + GREEDY) == is_off
    other = write_adapter(tmp_path / "b.gguf", "llama", {"output": pair}, 8)
    with monkeypatch.context() as patched:
        patched.setattr(model, "open_model", None)
        status, _, err = cli("-p", OLD_MAN, "--lora", str(other))
    assert status == 1 and "the adapter is for 'llama', the model is 'deepseek2'" in err, "before the model is read"
    status, _, err = cli("-p", OLD_MAN, "-m", str(path))
    assert status == 1 and "this is no model but an adapter: give it with --lora beside its model" in err
