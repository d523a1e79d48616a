"""The model file that the command line names: a path, one of the hub, of a URL, or the bundled one."""

from __future__ import annotations

import sys
from pathlib import Path

from ikpy.cli.logs import print_log
from ikpy.cli.params import CommonParams


def model_path(params: CommonParams) -> str:
    """The model file, one of the hub or of a URL, or the bundled one."""
    model = params.model
    if model.path is None and model.url is not None:
        from ikpy.tools.download import fetch_url

        path = fetch_url(model.url, model.hf_token, lambda line: print_log(params, [line]), offline=model.offline)
        model.alias = model.alias or Path(path).stem
        return path
    if model.path is None and model.hf_repo is not None:
        model.alias = model.alias or model.hf_repo
        return fetch_hub(params, model.hf_repo, model.hf_file)
    return default_model() if params.model.path is None else params.model.path


def fetch_hub(params: CommonParams, repository: str, file: str | None) -> str:
    """The file of a model on the hub, with the token of the command line, from the cache only if --offline says so."""
    from ikpy.tools.hub import fetch

    model = params.model
    return fetch(repository, file, model.hf_token, lambda line: print_log(params, [line]), offline=model.offline)


def default_model() -> str:
    """Path of the bundled model, which is noted on standard error."""
    import ikpy

    path = str(ikpy.default_model_path())
    print(f"no model given with -m: using the bundled tiny-mla-moe ({path})", file=sys.stderr)
    return path
