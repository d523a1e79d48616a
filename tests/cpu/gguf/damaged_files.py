"""Files as users have them, damaged at random, and the command lines that read them.

`python -m tests.cpu.gguf.damaged_files TARGET SEED SECONDS` runs case after case, each in a process of its own, and
prints those that end in anything but status 0 or one clear line and status 1; under a sanitizer these are its
findings too.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from random import Random

from ikpy.cli import COMMANDS, main
from tests.cpu.gguf.damage import (
    damage_bytes,
    damage_gguf,
    damage_json_text,
    damage_safetensors,
    damage_state,
    damage_text,
)
from tests.cpu.gguf.damaged_media import drafter_case, media_state_case, medium_case, projector_case
from tests.cpu.gguf.original_files import CHECKPOINTS, TEXT, Originals
from tests.shared import DATA

MODULES = [
    *(module for module, _ in COMMANDS.values()),
    *(f"ikpy.cli.{name}" for name in ("session", "text_run", "conversation")),
    *(f"ikpy.tools.{name}" for name in ("model_logs", "quantize", "perplexity", "kl_divergence", "imatrix_report")),
    *("ikpy.engine.context", "ikpy.convert", "ikpy.vocab", "jinja2", "typer._adapters"),
]
"""What the children of a run shall not have to import one by one."""
SECONDS_PER_CASE = 60
MEMORY_PER_CASE = 2 << 30


def _damaged(random: Random, source: Path, target: Path, damage: Callable[[Random, bytes], bytes]) -> str:
    target.write_bytes(damage(random, source.read_bytes()))
    return str(target)


def model_case(random: Random, files: Originals, folder: Path) -> list[str]:
    """A model: run, measured, quantized, tokenized, shown, merged."""
    source = random.choice([files.model, files.sentencepiece])
    path = _damaged(random, source, folder / "m.gguf", damage_gguf)
    out = str(folder / "out.gguf")
    return random.choice([
        files.generate(Path(path)), [*files.generate(Path(path)), "-rtr", "--no-mmap"],
        [*files.generate(Path(path)), "-ctk", "bf16", "--check-tensors"],
        ["perplexity", "-m", path, "-f", str(files.text), "-c", "32", "-t", "1", "--chunks", "1"],
        ["quantize", path, out, random.choice(["q4_0", "q4_k_m", "iq2_ks", "q8_0", "f32"]), "1"],
        ["tokenize", "-m", path, "-p", "The sea 12 äé <s>"],
        ["gguf", "dump", path, "--full"], ["gguf", "dump", path], ["gguf", "hash", path],
        ["gguf", "set", path, "general.name", "other", "-o", out],
        ["gguf", "split", path, str(folder / "part"), "--split-max-tensors", "4"],
        ["imatrix", "-m", path, "-f", str(files.text), "-c", "32", "-t", "1", "--chunks", "1", "-o", out],
        ["bench", "-m", path, "-p", "4", "-n", "1", "-t", "1", "-r", "1"],
    ])  # fmt: skip


def architecture_case(random: Random, files: Originals, folder: Path) -> list[str]:
    """A model of any architecture: run, measured, quantized, or what is made of texts by encoders."""
    path = _damaged(random, files.of_any_kind(random), folder / "m.gguf", damage_gguf)
    generate = files.generate(Path(path))
    return random.choice([
        generate, [*generate, "-rtr", "--no-mmap"], [*generate, "-fa", "off", "-ctk", "q8_0"], [*generate, "-mla", "1"],
        ["perplexity", "-m", path, "-f", str(files.text), "-c", "32", "-t", "1", "--chunks", "1"],
        ["quantize", path, str(folder / "out.gguf"), random.choice(["q4_k_m", "iq4_ks", "q8_0"]), "1"],
        ["bench", "-m", path, "-p", "20", "-n", "0", "-t", "1", "-r", "1"],
        ["imatrix", "-m", path, "-f", str(files.text), "-c", "32", "-t", "1", "--chunks", "1", "-o", str(folder / "i")],
    ])  # fmt: skip


def split_case(random: Random, files: Originals, folder: Path) -> list[str]:
    """One part of a split model: run, shown, merged."""
    shutil.rmtree(folder / "parts", ignore_errors=True)
    shutil.copytree(files.parts(), folder / "parts")
    parts = sorted((folder / "parts").iterdir())
    part = random.choice(parts)
    _damaged(random, part, part, damage_gguf)
    first = str(parts[0])
    merge = ["gguf", "merge", first, str(folder / "out.gguf"), "--overwrite"]
    return random.choice([files.generate(parts[0]), ["gguf", "dump", first], merge])


def adapter_case(random: Random, files: Originals, folder: Path) -> list[str]:
    """A LoRA adapter."""
    path = _damaged(random, files.adapter(), folder / "a.gguf", damage_gguf)
    return [*files.generate(files.model), *random.choice([["--lora", path], ["--lora-scaled", path, "0.5"]])]


def control_case(random: Random, files: Originals, folder: Path) -> list[str]:
    """A control vector."""
    path = _damaged(random, files.control_vector(), folder / "c.gguf", damage_gguf)
    return [*files.generate(files.model), "--control-vector", path]


def imatrix_case(random: Random, files: Originals, folder: Path) -> list[str]:
    """An importance matrix of either form, converted or used."""
    suffix = random.choice(["dat", "gguf"])
    damage = damage_gguf if suffix == "gguf" else damage_bytes
    path = _damaged(random, files.imatrix(suffix), folder / f"i.{suffix}", damage)
    other = str(folder / random.choice(["o.dat", "o.gguf"]))
    return random.choice([
        ["imatrix", "--in-file", path, "-o", other],
        ["imatrix", "--in-file", path, "--in-file", str(files.imatrix("dat")), "-o", other],
        ["quantize", "--imatrix", path, str(files.model), str(folder / "q.gguf"), "iq4_xs", "1"],
    ])  # fmt: skip


def state_case(random: Random, files: Originals, folder: Path) -> list[str]:
    """A prompt cache."""
    path = _damaged(random, files.prompt_cache(), folder / "state", damage_state)
    return [*files.generate(files.model), "--prompt-cache", path, *random.choice([[], ["--prompt-cache-ro"]])]


def lookup_case(random: Random, files: Originals, folder: Path) -> list[str]:
    """A lookup cache that is read, or read and written."""
    path = _damaged(random, files.lookup_cache(), folder / "lookup", damage_bytes)
    return [*files.generate(files.model), "--spec-type", "ngram-cache", random.choice(["-lcs", "-lcd"]), path]


def logits_case(random: Random, files: Originals, folder: Path) -> list[str]:
    """A base file of KL divergence."""
    source = files.logits()
    end = random.choice([20, 20, 300, None])
    path = _damaged(random, source, folder / "base", lambda r, data: damage_bytes(r, data, 0, end))
    return [*files.perplexity(), "--kl-divergence", "--kl-divergence-base", path]


DAMAGE_OF = {
    ".safetensors": damage_safetensors,
    ".json": damage_json_text,
    ".jinja": damage_text,
    ".model": damage_bytes,
}


def checkpoint_case(random: Random, files: Originals, folder: Path) -> list[str]:
    """A Hugging Face checkpoint."""
    target = folder / "checkpoint"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(DATA / "convert" / random.choice(CHECKPOINTS), target)
    for name in ("golden.npz", "tokens.json"):
        (target / name).unlink()
    for path in random.sample(sorted(target.iterdir()), random.choice([1, 1, 2])):
        _damaged(random, path, path, DAMAGE_OF[path.suffix])
    outtype = random.choice(["auto", "f32", "f16", "q8_0"])
    return ["convert", str(target), "--outfile", str(folder / "out.gguf"), "--outtype", outtype]


GRAMMAR = b'root ::= item+ ("," item){0,3}\nitem ::= [a-z] "x"? | "(" root ")" # note\n'
SCHEMA = b"""{"type": "object", "required": ["a"], "properties": {
  "a": {"type": "integer", "minimum": 3, "maximum": 90}, "b": {"enum": ["x", 1]},
  "c": {"type": "string", "pattern": "^[a-c]{2,3}$"}, "d": {"$ref": "#/$defs/e"}},
 "$defs": {"e": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"type": "number"}, "maxItems": 3}]}}}"""
CONFIG = b'ctx-size = 64\nthreads = 1\ntemp = 0.5\nseed = 3\noverride-kv = ["llama.context_length=int:64"]\n'
HELLASWAG = b"The man went\n2\nhome\nto the sea\naway\nup\n" * 2
WINOGRANDE = b'1,"The man saw the _ and left",sea,day,1\n2,"He ate the _ again",boat,fish,2\n'


_QUESTION = struct.pack("<I", 7) + b"The man" + struct.pack("<I", 2) + struct.pack("<I", 5) + b"slept"
_QUESTION += struct.pack("<I", 3) + b"ran" + struct.pack("<2i", 0, 1)
CHOICES = struct.pack("<3I", 2, 12, 12 + len(_QUESTION)) + 2 * _QUESTION


def text_case(random: Random, files: Originals, folder: Path) -> list[str]:
    """Grammars, schemas, chat templates, configurations, task files, prompts."""
    path = folder / "text"
    template = (DATA / "models" / "puppet.jinja").read_bytes()
    generate = files.generate(files.model)
    model = str(files.model)
    sources = [
        (GRAMMAR, damage_text, [*generate, "--grammar-file", str(path)]),
        (SCHEMA, damage_json_text, [*generate, "-jf", str(path)]),
        (template, damage_text, [*generate[:-2], "-cnv", "-st", "--chat-template-file", str(path)]),
        (CONFIG, damage_text, [*generate[:7], "--config", str(path)]),
        (HELLASWAG, damage_text, ["perplexity", "-m", model, "--hellaswag", "-f", str(path), "-t", "1"]),
        (WINOGRANDE, damage_text, ["perplexity", "-m", model, "--winogrande", "-f", str(path), "-t", "1"]),
        (CHOICES, damage_bytes, ["perplexity", "-m", model, "--multiple-choice", "-bf", str(path), "-t", "1"]),
        (TEXT.encode(), damage_text, [*generate[:3], "-f", str(path), *generate[5:]]),
    ]
    data, damage, arguments = random.choice(sources)
    path.write_bytes(damage(random, data))
    return arguments


TARGETS: dict[str, Callable[[Random, Originals, Path], list[str]]] = {
    "model": model_case,
    "architecture": architecture_case,
    "projector": projector_case,
    "medium": medium_case,
    "media_state": media_state_case,
    "drafter": drafter_case,
    "split": split_case,
    "adapter": adapter_case,
    "control": control_case,
    "imatrix": imatrix_case,
    "state": state_case,
    "lookup": lookup_case,
    "logits": logits_case,
    "checkpoint": checkpoint_case,
    "text": text_case,
}


# what is expected

NOISE = re.compile(
    r"Traceback|runtime error:|AddressSanitizer|ThreadSanitizer|panicked|internal error|Warning:|object at 0x"
)
MAX_LINE = 1000


def problem(status: int, error_text: str) -> str | None:
    """What is wrong with how a command ended; None if it is status 0, or one clear line and status 1."""
    if noise := NOISE.search(error_text):
        return f"standard error has {noise[0]!r}"
    lines = error_text.rstrip("\n").split("\n")
    errors = [line for line in lines if line.startswith("error: ")]
    if status == 0:
        return f"status 0 with {errors[0]!r}" if errors else None
    if status != 1:
        return f"status {status}"
    # The quantizer has its error, without a prefix, in front of a line of its own.
    error = errors[0] if errors else lines[-1 - lines[-1].startswith("main: failed")]
    if len(errors) > 1 or (errors and not lines[-1].startswith(("error: ", "usage: "))):
        return f"{len(errors)} error lines, the last line is {lines[-1][:200]!r}"
    if not error or len(error) > MAX_LINE:
        return f"an error of {len(error)} characters"
    return None if error.isprintable() else f"unprintable characters in {error[:300]!r}"


def run_case(target: str, seed: int, files: Originals, folder: Path) -> tuple[str | None, int]:
    """Run a case in a child process; returns what is wrong with it, and its exit status (128 + a signal)."""
    errors = folder / "stderr"
    errors.unlink(missing_ok=True)
    pid = os.fork()
    if not pid:
        _child(target, seed, files, folder)
    _, status, usage = os.wait4(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return f"signal {-code}", 128 - code
    found = problem(code, errors.read_text(errors="replace"))
    if found is None and usage.ru_maxrss * 1024 > MEMORY_PER_CASE:
        found = f"{usage.ru_maxrss >> 10} MiB of memory"
    return found, code


def _child(target: str, seed: int, files: Originals, folder: Path) -> None:
    for number, name in enumerate((os.devnull, folder / "stdout", folder / "stderr")):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644), number)
    signal.alarm(SECONDS_PER_CASE)
    status = 3
    try:
        arguments = TARGETS[target](Random(f"{target} {seed}"), files, folder)
        (folder / "arguments").write_text(json.dumps(arguments))
        status = main(arguments)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def run_target(target: str, first: int, seconds: float, folder: Path) -> None:
    """Case after case; prints what is wrong, and keeps the folder of each such case."""
    files = Originals(folder / "originals")
    for module in MODULES:
        import_module(module)
    counts: Counter[int] = Counter()
    end, seed = time.monotonic() + seconds, first
    while time.monotonic() < end:
        work = folder / f"{target}-{seed}"
        work.mkdir(exist_ok=True)
        found, code = run_case(target, seed, files, work)
        counts[code] += 1
        if found:
            print(f"{target} {seed}: {found}", flush=True)
        else:
            with open(folder / f"{target}.errors", "a") as log:
                log.write((work / "stderr").read_text(errors="replace").rstrip().rpartition("\n")[2] + "\n")
            shutil.rmtree(work)
        seed += 1
    print(f"{target}: seeds {first} to {seed - 1}, by status {dict(counts)}", flush=True)


if __name__ == "__main__":
    run_target(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4]))
