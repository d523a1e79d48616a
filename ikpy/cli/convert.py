"""`ikpy convert`: make a GGUF file from a Hugging Face checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from ikpy.cli.file_output import print_line, print_plan, progress_bar

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def run(arguments: Sequence[str]) -> int:
    """Run `ikpy convert` on its arguments; returns the exit status."""
    status = app(args=list(arguments) or ["--help"], prog_name="ikpy convert", standalone_mode=False)
    return int(status or 0)


@app.command()
def convert(
    folder: Annotated[
        str, typer.Argument(help="Folder with config.json, *.safetensors and the tokenizer.", metavar="FOLDER")
    ],
    *,
    mmproj: Annotated[
        bool,
        typer.Option(
            "--mmproj",
            help="Write the projector file of a model that takes pictures or sound, for --mmproj of other commands, "
            "instead of the text model.",
        ),
    ] = False,
    mtp: Annotated[
        bool,
        typer.Option(
            "--mtp",
            help="Write a file of the prediction layers alone, for -md of other commands, instead of the whole model.",
        ),
    ] = False,
    no_mtp: Annotated[
        bool, typer.Option("--no-mtp", help="Leave out layers that predict further tokens (MTP).")
    ] = False,
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            "--target-model-dir",
            help="Folder of the model that a drafter reads: its config.json and tokenizer.",
            metavar="FOLDER",
        ),
    ] = None,
    outfile: Annotated[
        str | None,
        typer.Option(
            "--outfile",
            help="File to write, mmproj- in front of its name with --mmproj. [default: NAME-TYPE.gguf in the folder, "
            "mtp- in front with --mtp]",
        ),
    ] = None,
    outtype: Annotated[
        str,
        typer.Option(
            "--outtype",
            help="Type of the matrices: f32, f16, bf16, q8_0, or auto (f16 for f16 checkpoints, else bf16). "
            "MXFP4 stays as it is, INT4 becomes Q4_0 of the same values.",
        ),
    ] = "auto",
    model_name: Annotated[
        str | None, typer.Option("--model-name", help="Value of general.name. [default: name of the folder]")
    ] = None,
    split_max_tensors: Annotated[
        int | None, typer.Option("--split-max-tensors", min=1, help="Most tensors per file; makes several files.")
    ] = None,
    split_max_size: Annotated[
        str | None,
        typer.Option("--split-max-size", help="Most tensor data per file, such as 500M or 2G; makes several files."),
    ] = None,
    pre: Annotated[
        str | None,
        typer.Option("--pre", help="Name of the pre-tokenizer (tokenizer.ggml.pre) when it is not recognised."),
    ] = None,
    chat_template_file: Annotated[
        str | None,
        typer.Option("--chat-template-file", help="File with the chat template, instead of the checkpoint's."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be written; write nothing.")] = False,
    no_lazy: Annotated[bool, typer.Option("--no-lazy", hidden=True)] = False,
    use_temp_file: Annotated[bool, typer.Option("--use-temp-file", hidden=True)] = False,
    _verbose: Annotated[bool, typer.Option("--verbose", help="A traceback with errors.")] = False,
) -> None:
    """Make a GGUF file from a Hugging Face checkpoint (safetensors)."""
    from ikpy.convert import Conversion, ConvertOptions, ProjectorConversion
    from ikpy.errors import UsageError
    from ikpy.tools.sizes import parse_size

    for option, given in (("--no-lazy", no_lazy), ("--use-temp-file", use_temp_file)):
        if given:
            print(f"warning: no effect: {option} (a tensor is read when it is written)", file=sys.stderr)
    chosen = [name for name, given in (("--mmproj", mmproj), ("--mtp", mtp), ("--no-mtp", no_mtp)) if given]
    if len(chosen) > 1:
        raise UsageError(f"{chosen[0]} and {chosen[1]} do not go together")
    if mmproj and target:
        raise UsageError("--mmproj and --target do not go together")
    options = ConvertOptions(
        prediction="only" if mtp else "none" if no_mtp else "keep",
        target=target or "",
        outtype=outtype.lower(),
        outfile=outfile or "",
        model_name=model_name or "",
        pre=pre or "",
        chat_template_file=chat_template_file or "",
        split_max_tensors=split_max_tensors,
        split_max_bytes=None if split_max_size is None else parse_size(split_max_size),
    )
    conversion = (ProjectorConversion if mmproj else Conversion)(folder, options)
    print_line(f"{conversion.arch}: {conversion.name}, {len(conversion.tensors)} tensors, {conversion.outtype}")
    for note in conversion.notes:
        print_line(f"note: {note}")
    if dry_run:
        for tensor in conversion.tensors:
            shape = ", ".join(f"{n:6d}" for n in reversed(tensor.output.shape))
            print_line(f"{tensor.output.name:48s} {tensor.type:>6s} [{shape}]")
        print_plan(conversion.plan(), dry_run=True)
        return
    with progress_bar("convert") as progress:
        plan = conversion.write(progress)
    print_plan(plan, dry_run=False)
