"""Models from the Hugging Face hub: `user/repository:QUANT` to a local file.

Downloads, cache and resumption are those of huggingface_hub; here is the choice of the file and what to say when the
hub cannot be reached.
"""

from __future__ import annotations

import contextlib
import errno
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath

from ikpy.errors import IkpyError, ResourceError, UsageError
from ikpy.gguf.model_names import choose_projector, has_quant, is_model, names_imatrix
from ikpy.gguf.splits import paths_from_first, shard_paths, split_parts

HUB_ADDRESS = re.compile(r"^(https?://)?(huggingface\.co|hf\.co)/")
USUAL_QUANTS = ("Q4_K_M", "Q4_K_S", "IQ4_XS", "Q4_0", "Q5_K_M", "Q8_0")
"""Taken in this order when no quantization is named."""
ANSWER_SECONDS = 5.0
"""The hub's first answer may take so long. It is asked for once: huggingface_hub's own requests for lists and files try
again for half a minute where nothing answers."""
PASSING = (408, 425, 429, *range(500, 600))
"""Answers of a hub that is overloaded or broken for a while."""
_listed: dict[str, list[str]] = {}
"""Files of repositories of which this process has downloaded one."""
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
"""Where no file is named."""


def split_spec(spec: str) -> tuple[str, str | None]:
    """Repository and quantization of `user/repository[:QUANT]`, also behind the hub's address; None for `latest`.

    Raises UsageError.
    """
    repo, _, quant = HUB_ADDRESS.sub("", spec).rstrip("/").partition(":")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        raise UsageError(f"-hf {spec}: expected user/repository or user/repository:QUANT")
    return repo, None if quant.lower() in ("", "latest") else quant


def choose(files: Sequence[str], quant: str | None, repo: str) -> list[str]:
    """The file of a quantization among the files of a repository, or all parts of a split one, first part first.

    Raises UsageError naming what there is.
    """
    models = sorted(filter(is_model, files), key=lambda name: (names_imatrix(name), name))
    firsts = [name for name in models if (part := split_parts(name)) is None or part[1] == 0]
    if not firsts:
        others = sorted(name for name in files if name.lower().endswith(".gguf"))
        if others:
            raise UsageError(f"-hf {repo}: no file is a model by its name; -hff takes any of {', '.join(others)}")
        raise UsageError(f"-hf {repo}: the repository has no GGUF files")
    for wanted in (quant,) if quant else USUAL_QUANTS:
        found = [name for name in firsts if has_quant(name, wanted)]
        if found:
            return all_shards(found[0], models, repo)
    if quant is None:
        return all_shards(firsts[0], models, repo)
    raise UsageError(f"-hf {repo}:{quant}: no such quantization; there are: {', '.join(map(short_name, firsts))}")


def fetch_projector(spec: str, token: str | None, log: Callable[[str], None]) -> str | None:
    """Path of the projector in the repository of a model that `fetch` has given, downloaded if it is not in the local
    cache; None if the repository has none, or it cannot be had. The hub is not asked for its files a second time."""
    from huggingface_hub import hf_hub_download

    repo, _ = split_spec(spec)
    if repo in _listed:
        name = choose_projector(_listed[repo])
        if name is None:
            return None
        try:
            log(f"hub: {repo}/{name}")
            return hf_hub_download(repo, name, token=token)
        except Exception as error:  # which library reaches the network depends on the version of huggingface_hub
            reason = str(refusal(repo, name, error) or error).partition("\n")[0]
            log(f"hub: warning: {name} was not downloaded: {reason}")
    for folder in snapshots(repo):
        files = [path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf") if path.exists()]
        if (name := choose_projector(files)) is not None:
            return str(folder / name)
    return None


def short_name(name: str) -> str:
    """File name without folder, part number and ending."""
    part = split_parts(name)
    return PurePosixPath(part[0] if part else name).name.removesuffix(".gguf")


def all_shards(first: str, models: Sequence[str], repo: str) -> list[str]:
    """All parts of a split model. Raises UsageError when one is missing."""
    names = shard_paths(first)
    missing = [] if names == [first] else [name for name in names if name not in models]
    if missing:
        raise UsageError(f"-hf {repo}: part {missing[0]} of the split model is missing in the repository")
    return names


def parts_of(file: str, files: Sequence[str], repo: str) -> list[str]:
    """A file of a repository, with all parts of a split model whose first it is. UsageError for another part."""
    return all_shards(paths_from_first(file, f"-hff {file}")[0], files, repo)


def fetch(spec: str, file: str | None, token: str | None, log: Callable[[str], None], *, offline: bool = False) -> str:
    """Path of the (first) file of a model in the local cache, downloaded if it is not there.

    ``file``: name of the file in the repository instead of a choice by quantization. ``offline``: the hub is not asked.
    The copy in the cache serves where the hub cannot be reached, is overloaded or broken, and where the cache cannot be
    written. Raises UsageError when the repository or the file does not exist or the hub refuses it, ResourceError when
    the cache has no copy.
    """
    repo, quant = split_spec(spec)
    try:
        if offline:
            raise OfflineError
        return download(repo, quant, file, token, log)
    except UsageError:
        raise
    except Exception as error:  # which library reaches the network depends on the version of huggingface_hub
        refused = refusal(repo, file, error)
        path = None if isinstance(refused, UsageError) else cached(repo, quant, file)
        if path is None:
            raise refused or unreachable(repo, quant, file, error) from error
        return path


class OfflineError(Exception):
    """The command line says that the hub is not to be asked."""


def download(repo: str, quant: str | None, file: str | None, token: str | None, log: Callable[[str], None]) -> str:
    """Path of the (first) file as the hub has it now, with all parts of a split model from one commit.

    Raises UsageError from the choice, and errors of any library.
    """
    from huggingface_hub import HfApi, hf_hub_download

    known = HfApi(token=token).model_info(repo, timeout=ANSWER_SECONDS).siblings or []
    files = _listed[repo] = [item.rfilename for item in known]
    names = parts_of(file, files, repo) if file else choose(files, quant, repo)
    path, commit = "", None
    with warnings.catch_warnings():  # a disk that is too small
        warnings.showwarning = lambda message, *_, **__: log(f"hub: warning: {message}")
        for name in names:
            log(f"hub: {repo}/{name}")
            got = hf_hub_download(repo, name, token=token, revision=commit)
            if commit is None:  # later parts are of this one, whatever is uploaded meanwhile
                path, commit = got, Path(got).parents[name.count("/")].name
    return path


def refusal(repo: str, file: str | None, error: BaseException) -> IkpyError | None:
    """What an answer of the hub or an error of the disk means, None if there was neither.

    UsageError for answers that stay as they are, ResourceError for what may pass.
    """
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    if isinstance(error, LocalEntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__  # the answer after which the cache was looked at
    if isinstance(error, GatedRepoError):
        return UsageError(f"-hf {repo}: access must be granted on the hub first; give the token with --hf-token")
    if isinstance(error, RepositoryNotFoundError):
        return UsageError(f"-hf {repo}: no such repository (a private one needs --hf-token)")
    if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
        return UsageError(f"-hf {repo}: the repository has no file {file}")
    if isinstance(error, HFValidationError):
        return UsageError(f"-hf {repo}: {error}")
    response = getattr(error, "response", None)
    if isinstance(error, HfHubHTTPError) and response is not None:
        status = response.status_code
        return (ResourceError if status in PASSING else UsageError)(f"-hf {repo}: the hub answered {status}")
    if type(error) is OSError and error.errno is None:  # a file that came with another size than the hub tells
        return ResourceError(f"-hf {repo}: the transfer failed: {str(error).splitlines()[0]}")
    if isinstance(error, OSError) and (error.filename or error.errno in DISK_ERRORS):
        from huggingface_hub import constants

        place = error.filename or constants.HF_HUB_CACHE
        return ResourceError(f"-hf {repo}: cannot write {place}: {error.strerror}; HF_HOME names another place")
    return None


def cached(repo: str, quant: str | None, file: str | None) -> str | None:
    """The (first) file in the local cache, None if the cache lacks it or one of its parts."""
    for folder in snapshots(repo):
        files = [path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf") if path.exists()]
        with contextlib.suppress(UsageError):
            names = parts_of(file, files, repo) if file else choose(files, quant, repo)
            if set(names) <= set(files):
                return str(folder / names[0])
    return None


def snapshots(repo: str) -> list[Path]:
    """Folders of a repository's commits in the local cache: the newest that is known first, then in the order of use.

    Each holds only what was asked for while it was the newest.
    """
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    storage = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model")
    folders, newest = [], ""
    with contextlib.suppress(OSError):
        folders = sorted((storage / "snapshots").iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        newest = (storage / "refs" / "main").read_text().strip()
    return sorted(folders, key=lambda path: path.name != newest)


def unreachable(repo: str, quant: str | None, file: str | None, error: Exception) -> ResourceError:
    """What to say when nothing answered and the cache has no copy."""
    from huggingface_hub import constants

    asked = "is not asked (--offline)" if isinstance(error, OfflineError) else "cannot be reached"
    wanted = file or (f"{repo}:{quant}" if quant else repo)
    return ResourceError(
        f"-hf {repo}: the hub at {constants.ENDPOINT} {asked} and {wanted} is not in the cache "
        f"{constants.HF_HUB_CACHE}; go online once, bring the cache of another machine (HF_HOME says where it is), "
        "or download the file elsewhere and give it with -m"
    )
