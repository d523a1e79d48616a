"""Checks of what the command line says and names, made before a model is loaded: that may take minutes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ikpy.errors import IkpyError, UsageError
from ikpy.gguf.atomic import check_replaceable

if TYPE_CHECKING:
    from ikpy.cli.params import CommonParams


def check_before_loading(params: CommonParams, context_changes: Mapping[str, Any]) -> None:
    """Looks at all that can be judged without the model. ``context_changes``: what the tool changes of the context.

    Raises:
        IkpyError: with one line that names the option or the file.
    """
    params.sampling.check()
    params.context_params(**context_changes).check()
    check_constraints(params)
    check_added_files(params)
    check_drafters(params)
    check_prompt_cache(params)
    check_media(params)
    if params.prompt.chat_template is not None:
        from ikpy.vocab.templates import ChatTemplate

        ChatTemplate.from_argument(params.prompt.chat_template)


def check_constraints(params: CommonParams) -> None:
    """Grammar and schema of the output."""
    grammar, schema = params.sampling.grammar, params.sampling.json_schema
    if not grammar and schema is None:
        return
    from ikpy.engine.grammars.gbnf import parse_gbnf
    from ikpy.engine.grammars.grammar import LARK_MARK, parsed_schema

    if grammar and not grammar.lstrip().startswith(LARK_MARK):
        parse_gbnf(grammar)
    if schema is not None:
        from ikpy.engine.grammars.json_schema import schema_to_gbnf

        schema_to_gbnf(parsed_schema(schema))


def check_added_files(params: CommonParams) -> None:
    """Adapters and control vectors: whether they are there and what they say they are."""
    from ikpy.engine.adapter import check_adapter_file
    from ikpy.engine.control_vector import check_control_vector_file

    model = params.model
    need_files("--lora", (path for path, _ in model.lora))
    need_files("--control-vector", (path for path, _ in model.control_vectors))
    for path, _ in model.lora:
        with named("--lora"):
            check_adapter_file(path)
    for path, _ in model.control_vectors:
        with named("--control-vector"):
            check_control_vector_file(path)


def check_drafters(params: CommonParams) -> None:
    """Types and settings of speculative decoding, and the files that drafters read."""
    options = params.speculative
    if options.model_draft is None and not options.types:
        return
    from ikpy.cli.drafters import speculative_params

    settings = speculative_params(params)
    settings.check()
    if "draft" in settings.types and options.model_draft is None:
        raise UsageError("--spec-type draft needs a draft model: give one with -md")
    read = {"-md": options.model_draft, "--suffix-corpus": options.suffix_corpus, "-lcs": options.lookup_static}
    for option, path in read.items():
        need_files(option, [] if path is None else [path])
    if options.model_draft is not None:
        from ikpy.gguf.reader import GGUFFile

        with named("-md"), GGUFFile.open(options.model_draft, header_only=True):
            pass
    if options.lookup_dynamic is not None:
        need_output("-lcd", options.lookup_dynamic)


def check_media(params: CommonParams) -> None:
    """The projector and the files of pictures and sounds."""
    from ikpy.tools.media_files import read_media

    media = params.media
    if media.files and not has_projector(params):
        raise UsageError("--image and --audio need a projector: give its file with --mmproj")
    need_files("--image, --audio", media.files)
    for path in media.files:
        read_media(path)
    if media.projector is not None and media.use_projector is not False:
        need_files("--mmproj", [media.projector])
    if media.folder is not None and not os.path.isdir(media.folder):
        raise UsageError(f"--media-path {media.folder}: no such directory")
    if media.min_tokens and media.max_tokens and media.min_tokens > media.max_tokens:
        raise UsageError(f"--image-min-tokens {media.min_tokens} is above --image-max-tokens {media.max_tokens}")


def has_projector(params: CommonParams) -> bool:
    """Whether the command line names a projector, or models that may have one beside them."""
    from ikpy.cli.model_files import is_from_hub

    media, server = params.media, params.server
    if media.use_projector is False:
        return False
    named = media.projector or media.url or media.use_projector or server.models_dir or server.models_preset
    return bool(named) or is_from_hub(params)


def check_prompt_cache(params: CommonParams) -> None:
    """The file of --prompt-cache: one that can be written, or at least read."""
    path = params.prompt.prompt_cache
    if not path:
        return
    if not params.prompt.prompt_cache_ro:
        need_output("--prompt-cache", path)
    elif os.path.exists(path):
        need_files("--prompt-cache", [path])


@contextmanager
def named(option: str) -> Iterator[None]:
    """Puts the option before the message of an error about its file."""
    try:
        yield
    except IkpyError as error:
        raise type(error)(f"{option} {error}") from None


def need_files(option: str, paths: Iterable[str]) -> None:
    """UsageError for the first path that is no readable file."""
    for path in paths:
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            raise UsageError(f"{option} {path}: {error.strerror}") from None


def need_output(option: str, path: str) -> None:
    """UsageError unless a file of this name can be written, replacing what is there."""
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path):
        raise UsageError(f"{option} {path}: this is a folder; name a file")
    if not os.path.isdir(folder):
        raise UsageError(f"{option} {path}: there is no folder {folder}")
    try:
        check_replaceable(path)
    except OSError as error:
        raise UsageError(f"{option} {path}: {error.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise UsageError(f"{option} {path}: the folder {folder} is not writable")


def need_folder(option: str, path: str) -> None:
    """Makes a folder for files to be written later. UsageError unless it is there and can be written to."""
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{option} {path}: {error.strerror}") from None
    if not os.access(path, os.W_OK):
        raise UsageError(f"{option} {path}: the folder is not writable")
