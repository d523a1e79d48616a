"""The model file that the command line names: a path, one of the hub, of a URL, or the bundled one."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ikpy.cli.logs import print_log
from ikpy.cli.params import CommonParams
from ikpy.errors import FileFormatError, UnsupportedError, UsageError
from ikpy.gguf.model_names import choose_projector, projectors_in

if TYPE_CHECKING:
    from ikpy.gguf.reader import GGUFFile
    from ikpy.vocab import Vocab

HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+(:[\w.-]+)?")


def model_path(params: CommonParams) -> str:
    """The model file, one of the hub or of a URL, or the bundled one."""
    model = params.model
    if model.path is not None and not os.path.exists(model.path) and (model.url or model.hf_repo):
        return fetch_to(params, model.path)
    if model.path is None and model.url is not None:
        path = fetch(params, model.url)
        model.alias = model.alias or Path(path).stem
        return path
    if model.path is None and model.hf_repo is not None:
        model.alias = model.alias or model.hf_repo
        return fetch_hub(params, model.hf_repo, model.hf_file)
    if model.path is None:
        return default_model()
    check_not_repository(model.path)
    return model.path


def fetch_to(params: CommonParams, path: str) -> str:
    """The file of --model-url or of the hub, downloaded to the path of -m, where there is none yet."""
    from huggingface_hub import hf_hub_url

    from ikpy.tools.hub import split_spec

    model = params.model
    if model.url is not None:
        return fetch(params, model.url, path)
    assert model.hf_repo is not None
    repository, quant = split_spec(model.hf_repo)
    if quant is not None and model.hf_file is None:
        raise UsageError(f"-m {path}: there is no such file; with -hf {model.hf_repo} leave -m out, or add -hff FILE")
    return fetch(params, hf_hub_url(repository, model.hf_file or Path(path).name), path)


def fetch(params: CommonParams, url: str, to: str | None = None) -> str:
    """The file of a URL, with the token of the command line, from the cache only if --offline says so."""
    from ikpy.tools.download import fetch_url

    model = params.model
    return fetch_url(url, model.hf_token, lambda line: print_log(params, [line]), offline=model.offline, to=to)


def check_not_repository(path: str) -> None:
    """UsageError for what looks like a model of the hub given as a path."""
    if HUB_NAME.fullmatch(path) and not path.endswith(".gguf") and not os.path.exists(os.path.dirname(path)):
        raise UsageError(f"-m {path}: there is no such file; a model of the Hugging Face hub is given as -hf {path}")


def fetch_hub(params: CommonParams, repository: str, file: str | None) -> str:
    """The file of a model on the hub, with the token of the command line, from the cache only if --offline says so."""
    from ikpy.tools.hub import fetch

    model = params.model
    return fetch(repository, file, model.hf_token, lambda line: print_log(params, [line]), offline=model.offline)


def projector_path(params: CommonParams) -> str | None:
    """The projector: of --mmproj, of a URL, or the one beside the model, if it is of the hub or --mmproj-auto is given;
    None if there is none."""
    media, model = params.media, params.model
    if media.use_projector is False:
        return None
    if media.projector is not None and (media.url is None or os.path.exists(media.projector)):
        return media.projector
    if media.url is not None:
        return fetch(params, media.url, media.projector)
    if model.path is not None and media.use_projector:
        folder = Path(model.path).parent
        name = choose_projector(projectors_in(folder))
        return None if name is None else str(folder / name)
    if model.hf_repo is None or not is_from_hub(params) or params.tool not in ("server", "cli"):
        return None
    from ikpy.tools.hub import fetch_projector

    return fetch_projector(model.hf_repo, model.hf_token, lambda line: print_log(params, [line]))


def is_from_hub(params: CommonParams) -> bool:
    """Whether the model is one of the hub."""
    model = params.model
    return model.hf_repo is not None and model.path is None and model.url is None


def default_model() -> str:
    """Path of the bundled model, which is noted on standard error."""
    import ikpy

    path = str(ikpy.default_model_path())
    print(f"no model given with -m: using the bundled tiny-mla-moe ({path})", file=sys.stderr)
    return path


def read_vocab(file: GGUFFile, metadata: Mapping[str, Any]) -> Vocab:
    """The vocabulary in a file's metadata. Errors name the file, and what it is if it holds no model."""
    from ikpy.vocab import Vocab

    try:
        return Vocab.from_metadata(metadata)
    except (FileFormatError, UnsupportedError) as error:
        from ikpy.engine.model import check_holds_model

        check_holds_model(file)
        raise type(error)(f"{file.path}: {error}") from None
