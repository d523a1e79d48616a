"""What can be judged without the model is judged before it is opened: one line, exit status 1."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

import ikpy
from ikpy.cli import main

CASES = [
    ("cli --lora MISSING", "--lora MISSING: No such file or directory"),
    ("cli --lora-scaled MISSING 0.5", "--lora MISSING: No such file or directory"),
    ("cli --lora TEXT", "--lora TEXT: not a GGUF file"),
    ("cli --lora MODEL", "--lora MODEL: not a LoRA adapter: it has no key general.type"),
    ("sweep-bench --lora MISSING", "--lora MISSING: No such file or directory"),
    ("imatrix -f TEXT --lora MISSING", "--lora MISSING: No such file or directory"),
    ("perplexity -f TEXT --control-vector MISSING", "--control-vector MISSING: No such file or directory"),
    ("cli --control-vector-scaled MISSING 2", "--control-vector MISSING: No such file or directory"),
    ("cli --control-vector MODEL", "--control-vector MODEL: the file holds no control vector"),
    ("cli --control-vector-layer-range 5 2", "expected START END with START not above END, got '5 2'"),
    ("cli --spec-type eagle", "--spec-type eagle: possible types are none, ngram-simple"),
    ("server --spec-type eagle", "--spec-type eagle: possible types are none, ngram-simple"),
    ("cli --spec-type ngram-mod:n_max=-1", "--spec-type (n_max: expected at least 0, got -1)"),
    ("cli --spec-type draft", "--spec-type draft needs a draft model: give one with -md"),
    ("cli -md MISSING", "-md MISSING: No such file or directory"),
    ("cli -md TEXT", "-md TEXT: not a GGUF file"),
    ("cli --spec-type suffix --suffix-corpus MISSING", "--suffix-corpus MISSING: No such file or directory"),
    ("cli --spec-type ngram-cache -lcs MISSING", "-lcs MISSING: No such file or directory"),
    ("cli --spec-type ngram-cache -lcd MISSING/x", "-lcd MISSING/x: there is no folder"),
    ("cli --spec-type ngram-cache -lcd PIPE", "-lcd PIPE: this is no regular file that could be replaced"),
    ("perplexity -f TEXT --save-all-logits PIPE", "PIPE: this is no regular file that could be replaced"),
    ("cli --prompt-cache PIPE", "--prompt-cache PIPE: this is no regular file that could be replaced"),
    ("cli --prompt-cache MISSING/x", "--prompt-cache MISSING/x: there is no folder"),
    ("cli --spec-type suffix --draft-p-min 3", "p_min must be between 0 and 1, not 3"),
    ("cli --mirostat 7", "mirostat must be 0, 1 or 2, not 7"),
    ("server --mirostat 7", "mirostat must be 0, 1 or 2, not 7"),
    ("cli --repeat-penalty 0", "repeat_penalty must be positive"),
    ("cli --grammar root", "error parsing grammar: expecting ::="),
    ("server --grammar root", "error parsing grammar: expecting ::="),
    ("cli --json-schema {", "JSON schema is not valid JSON"),
    ("""server -j '{"type": "nonsense"}'""", 'unknown type "nonsense"'),
    ("cli --cfg-scale 2 -i", "--cfg-scale works for the continuation of a prompt"),
    ("cli -ctv q8_0 -no-fa", "V cache quantization requires flash_attn"),
    ("server --chat-template {%if", "chat template, line 1"),
    ("server --api-key-file MISSING", "--api-key-file MISSING: No such file or directory"),
    ("server --ssl-key-file MISSING --ssl-cert-file TEXT", "--ssl-key-file MISSING: No such file or directory"),
    ("server -c 64 -np 32", "a context of 256 tokens is too small for 32 slots"),
    ("server -c 16 -np 64 -no-fa", "a context of 32 tokens is too small for 64 slots"),
    ("server -np 65", "65 parallel sequences: 1 to 64 are possible"),
    ("perplexity -f TEXT --kl-divergence --kl-divergence-base MISSING", "failed to open MISSING"),
    ("perplexity -f TEXT --save-all-logits MISSING/x", "there is no folder MISSING"),
    ("perplexity -f TEXT -ld TEXT/x", "-ld TEXT/x: Not a directory"),
    ("perplexity -f TEXT --chunks 0", "--chunks 0 leaves nothing to evaluate"),
    ("imatrix -f TEXT --chunks 0", "--chunks 0 leaves nothing to process"),
    ("sweep-bench -c 256 -ub 1024", "-ub 1024 is larger than the context (256)"),
    ("cli -gan 4 -gaw 2048", "self-extend is not supported; extend the context with YaRN instead: --rope-scaling yarn"),
]


@pytest.mark.parametrize(("line", "message"), CASES, ids=[line for line, _ in CASES])
def test_noticed_before_the_model_is_opened(
    line: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model of these command lines does not exist, and no error says so."""
    text = tmp_path / "text.txt"
    text.write_text("some text")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    names = {
        "PIPE": str(pipe),
        "MISSING": str(tmp_path / "missing"),
        "TEXT": str(text),
        "MODEL": str(ikpy.default_model_path()),
    }
    for name, path in names.items():
        line, message = line.replace(name, path), message.replace(name, path)
    tool, *arguments = shlex.split(line)
    port = ["--port", "0"] if tool == "server" else []
    assert main([tool, "-m", str(tmp_path / "no-model.gguf"), *port, *arguments]) == 1
    errors = [found for found in capsys.readouterr().err.splitlines() if "error" in found]
    assert len(errors) == 1 and message in errors[0], errors
