"""`ikpy tokenize`: show how a text is divided into tokens."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from ikpy.cli.logs import print_log
from ikpy.cli.model_files import model_path, read_vocab
from ikpy.cli.params import CommonParams, LogOptions, ModelOptions
from ikpy.cli.parser import suggest
from ikpy.errors import UsageError

USAGE = """usage: ikpy tokenize [options]

Divides a text into tokens with the vocabulary of a model and prints them.

    -h, --help               print this help and exit
    -m FILE, --model FILE    model (default: the bundled tiny-mla-moe)
    --ids                    print only the ids, as [1, 2, 3]
    -f FILE, --file FILE     read the text from a file
    -p TEXT, --prompt TEXT   the text
    --stdin                  read the text from standard input
    --no-bos                 do not add a BOS token, even if the model wants one
    --no-parse-special       special tokens in the text are ordinary text
    --no-escape              \\n and the like stand for themselves, as they always do
    --log-disable            no log lines on standard error
    --show-count             print the number of tokens
"""
VALUE_OPTIONS = {
    "-m": "model",
    "--model": "model",
    "-f": "file",
    "--file": "file",
    "-p": "prompt",
    "--prompt": "prompt",
}
FLAGS = {
    "--ids": "ids",
    "--stdin": "stdin",
    "--no-bos": "no_bos",
    "--no-parse-special": "no_parse_special",
    "--no-escape": "no_escape",
    "--log-disable": "log_disable",
    "--show-count": "show_count",
    "-h": "help",
    "--help": "help",
    "-v": "verbose",
    "--verbose": "verbose",
}


@dataclass
class TokenizeOptions:
    """Values of the command line."""

    model: str | None = None
    file: str | None = None
    prompt: str | None = None
    stdin: bool = False
    ids: bool = False
    no_bos: bool = False
    no_parse_special: bool = False
    no_escape: bool = False
    log_disable: bool = False
    show_count: bool = False
    verbose: bool = False
    help: bool = False


def parse_options(arguments: Sequence[str]) -> TokenizeOptions:
    """Read the options.

    Raises:
        UsageError: unknown option, missing value, no text or more than one.
    """
    options = TokenizeOptions()
    rest = iter(arguments)
    for name in rest:
        if name in FLAGS:
            setattr(options, FLAGS[name], True)
        elif name in VALUE_OPTIONS:
            value = next(rest, None)
            if value is None:
                raise UsageError(f"{name}: a value is missing")
            setattr(options, VALUE_OPTIONS[name], value)
        else:
            raise UsageError(f"unknown option '{name}'{suggest(name, [*FLAGS, *VALUE_OPTIONS])}")
    if options.help:
        return options
    sources = (options.stdin, options.file is not None, options.prompt is not None)
    if sum(sources) == 0:
        raise UsageError("must specify one of: --stdin, --file or --prompt.")
    if sum(sources) > 1:
        raise UsageError("--stdin, --file and --prompt are mutually exclusive.")
    return options


def read_text(options: TokenizeOptions) -> bytes:
    """Bytes of the text.

    Raises:
        UsageError: the file cannot be read.
    """
    if options.prompt is not None:
        return os.fsencode(options.prompt)
    if options.file is None:
        return sys.stdin.buffer.read()
    try:
        with open(options.file, "rb") as stream:
            return stream.read()
    except OSError as error:
        raise UsageError(f"could not open file '{options.file}' for reading: {error.strerror}") from error


def run(arguments: Sequence[str]) -> int:
    """Print the tokens; returns the exit status."""
    options = parse_options(arguments)
    if options.help:
        print(USAGE, end="")
        return 0
    from ikpy.gguf.reader import GGUFFile
    from ikpy.tools import model_logs, tokenize

    text = read_text(options)
    params = CommonParams("tokenize", ModelOptions(options.model), log=LogOptions(disable=options.log_disable))
    path = model_path(params)
    with GGUFFile.open(path, header_only=True) as file:
        vocab = read_vocab(file, file.metadata)
        print_log(params, model_logs.loader_lines(file, path))
        print_log(params, model_logs.vocab_summary_lines(vocab, file.metadata))
    add_special = vocab.add_bos and not options.no_bos
    ids = vocab.tokenize(text, add_special=add_special, parse_special=not options.no_parse_special)
    output = tokenize.ids_line(ids) if options.ids else tokenize.token_lines(vocab, ids)
    sys.stdout.buffer.write(output)
    if options.show_count:
        sys.stdout.buffer.write(tokenize.count_line(ids))
    sys.stdout.buffer.flush()
    return 0
