"""Command lines of the scripts that compare llama.cpp's arrays (`capture`) with ours (`check`)."""

from __future__ import annotations

import argparse


def tokens_of(text: str) -> list[int]:
    """Numbers between commas."""
    return [int(part) for part in text.split(",")]


def arguments(description: str | None, draft: str, **numbers: int) -> argparse.Namespace:
    """The arguments of a run; ``draft`` is the name of the argument for the draft file, ``numbers`` further options of
    `capture` with their usual values.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("capture", "check"):
        command = commands.add_parser(name)
        command.add_argument("model")
        command.add_argument(draft)
        if name == "check":
            command.add_argument("captured")
            continue
        command.add_argument("--tokens", required=True, type=tokens_of)
        for option, usual in numbers.items():
            command.add_argument(f"--{option}", type=int, default=usual)
        command.add_argument("--out", required=True)
    return parser.parse_args()
