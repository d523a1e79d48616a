"""`ikpy gguf`: show, split, merge, edit and compare GGUF files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from ikpy.cli.file_output import done, print_line, print_plan, progress_bar
from ikpy.errors import UsageError

app = typer.Typer(
    help="Show, split, merge, edit and compare GGUF files.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ModelArgument = Annotated[str, typer.Argument(help="GGUF file; the first one of a split model.", metavar="FILE")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be done; write nothing.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace output files that exist.")]
Output = Annotated[str | None, typer.Option("--output", "-o", help="Write the result there and leave FILE alone.")]


def run(arguments: Sequence[str]) -> int:
    """Run `ikpy gguf` on its arguments; returns the exit status."""
    if {"--merge", "--split"} <= set(arguments):
        raise UsageError("--merge and --split exclude each other")
    status = app(args=list(arguments) or ["--help"], prog_name="ikpy gguf", standalone_mode=False)
    return int(status or 0)


@app.command()
def dump(
    model: ModelArgument,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    no_tensors: Annotated[bool, typer.Option("--no-tensors", help="Leave out the tensor table.")] = False,
    by_kind: Annotated[
        bool, typer.Option("--by-kind", help="A line per kind of tensor with its blocks and sizes, and no metadata.")
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="Print whole arrays and strings.")] = False,
    this_file: Annotated[
        bool, typer.Option("--this-file", help="Show this file alone, even if it is one of a split model.")
    ] = False,
) -> None:
    """Print metadata and the tensor table. Works on files without their data, too."""
    from ikpy.tools import gguf_dump, gguf_kinds

    with gguf_dump.open_model(model, this_file=this_file) as file:
        if by_kind and as_json:
            print(json.dumps([kind.described() for kind in gguf_kinds.kinds(file.tensors.values())], indent=1))
            return
        if by_kind:
            for line in gguf_kinds.kind_lines(file.tensors.values()):
                print_line(line)
            return
        if as_json:
            print(json.dumps(gguf_dump.describe(file, tensors=not no_tensors, full=full), indent=1))
            return
        for line in gguf_dump.dump_lines(file, tensors=not no_tensors, full=full):
            print_line(line)


@app.command()
def split(
    model: ModelArgument,
    prefix: Annotated[str, typer.Argument(help="Outputs are PREFIX-00001-of-0000N.gguf and so on.", metavar="PREFIX")],
    *,
    split_max_tensors: Annotated[
        int | None, typer.Option("--split-max-tensors", min=1, help="Most tensors per file. [default: 128]")
    ] = None,
    split_max_size: Annotated[
        str | None, typer.Option("--split-max-size", help="Most tensor data per file, such as 500M or 2G.")
    ] = None,
    bare_first: Annotated[
        bool, typer.Option("--no-tensor-first-split", help="No tensors in the first file, only the metadata.")
    ] = False,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    _mode: Annotated[bool, typer.Option("--split", hidden=True)] = True,
) -> None:
    """Cut a model into several files."""
    from ikpy.tools import gguf_split, sizes

    max_bytes = None if split_max_size is None else sizes.parse_size(split_max_size)
    with progress_bar("split") as progress:
        plan = gguf_split.split(
            model,
            prefix,
            max_tensors=split_max_tensors,
            max_bytes=max_bytes,
            bare_first=bare_first,
            dry_run=dry_run,
            overwrite=overwrite,
            progress=progress,
        )
    print_plan(plan, dry_run)


@app.command()
def merge(
    model: ModelArgument,
    output: Annotated[str, typer.Argument(help="The single file to write.", metavar="OUTPUT")],
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    _mode: Annotated[bool, typer.Option("--merge", hidden=True)] = True,
) -> None:
    """Put the files of a split model into one."""
    from ikpy.tools import gguf_split

    with progress_bar("merge") as progress:
        plan = gguf_split.merge(model, output, dry_run=dry_run, overwrite=overwrite, progress=progress)
    print_plan(plan, dry_run)


@app.command("set")
def set_command(
    model: ModelArgument,
    key: Annotated[str, typer.Argument(help="Metadata key.", metavar="KEY")],
    value: Annotated[str, typer.Argument(help="New value; put -- before a negative number.", metavar="VALUE")],
    *,
    type_label: Annotated[
        str | None,
        typer.Option("--type", help="u8 i8 u16 i16 u32 i32 u64 i64 f32 f64 bool str; needed when the key is new."),
    ] = None,
    change_type: Annotated[
        bool, typer.Option("--change-type", help="Allow --type to differ from the stored type.")
    ] = False,
    output: Output = None,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    _force: Annotated[bool, typer.Option("--force", hidden=True)] = True,
) -> None:
    """Change or add one metadata key (a number, bool or string)."""
    from ikpy.tools import gguf_dump, gguf_edit

    with progress_bar("set") as progress:
        result = gguf_edit.set_value(
            model,
            key,
            value,
            value_type=None if type_label is None else gguf_edit.parse_value_type(type_label),
            change_type=change_type,
            output=output,
            overwrite=overwrite,
            dry_run=dry_run,
            progress=progress,
        )
    old = "(new key)" if result.old is None else gguf_dump.scalar_text(result.old)
    new = gguf_dump.scalar_text(result.new)
    how = "in place" if result.in_place else "rewritten"
    print_line(f"{result.target}: {result.key} ({result.type.label}): {old} -> {new} [{done(how, dry_run)}]")


@app.command()
def rename(
    model: ModelArgument,
    key: Annotated[str, typer.Argument(help="Metadata key.", metavar="KEY")],
    new_key: Annotated[str, typer.Argument(help="Its new name.", metavar="NEW_KEY")],
    *,
    output: Output = None,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
) -> None:
    """Give a metadata key another name; its value may be an array."""
    _change_keys(model, {key: new_key}, output, dry_run=dry_run, overwrite=overwrite)


@app.command()
def remove(
    model: ModelArgument,
    keys: Annotated[list[str], typer.Argument(help="Metadata keys.", metavar="KEY")],
    *,
    output: Output = None,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
) -> None:
    """Remove metadata keys."""
    _change_keys(model, dict.fromkeys(keys), output, dry_run=dry_run, overwrite=overwrite)


def _change_keys(
    model: str, changes: Mapping[str, str | None], output: str | None, *, dry_run: bool, overwrite: bool
) -> None:
    from ikpy.tools import gguf_edit

    with progress_bar("rewrite") as progress:
        target = gguf_edit.change_keys(
            model, changes, output=output, overwrite=overwrite, dry_run=dry_run, progress=progress
        )
    for key, new in changes.items():
        print_line(f"{target}: {key} -> {new or '(removed)'} [{done('rewritten', dry_run)}]")


@app.command("hash")
def hash_command(
    model: ModelArgument,
    *,
    xxh64: Annotated[bool, typer.Option("--xxh64", help="xxHash of 64 bits, the fastest.")] = False,
    sha1: Annotated[bool, typer.Option("--sha1", help="SHA-1.")] = False,
    sha256: Annotated[bool, typer.Option("--sha256", help="SHA-256, which is taken without any of these.")] = False,
    as_uuid: Annotated[
        bool, typer.Option("--uuid", help="A UUID of all data (version 5), such as databases want.")
    ] = False,
    all_of_them: Annotated[bool, typer.Option("--all", help="xxHash, SHA-1 and SHA-256.")] = False,
    no_layer: Annotated[bool, typer.Option("--no-layer", help="Only the digest of all tensors.")] = False,
    check: Annotated[
        str | None, typer.Option("--check", "-c", help="Compare with the digests in this file.", metavar="MANIFEST")
    ] = None,
) -> int:
    """Print digests of the tensors, or compare them."""
    from ikpy.tools import gguf_hash

    wanted = (xxh64 or all_of_them, sha1 or all_of_them, sha256 or all_of_them, as_uuid)
    chosen = [name for name, is_wanted in zip(gguf_hash.ALGORITHMS, wanted, strict=True) if is_wanted]
    with progress_bar("hash") as progress:
        if check is None:
            for digest in gguf_hash.digests(model, chosen or ["sha256"], progress=progress):
                if not (no_layer and digest.tensor):
                    print_line(digest.line(model))
            return 0
        expected = gguf_hash.read_manifest(check, model, chosen or gguf_hash.ALGORITHMS, only_whole=no_layer)
        lines = gguf_hash.differences(model, expected, progress=progress)
    for line in lines:
        print_line(f"{model}: {line}")
    print_line(f"{model}: {len(expected) - len(lines)} of {len(expected)} digests agree")
    return 1 if lines else 0
