"""State files of slots: written, read, and kept over a restart."""

from __future__ import annotations

import contextlib
import json
import zlib
from itertools import chain, count, takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from ikpy.engine.kv_cache import KVCacheFullError
from ikpy.engine.sequence_state import load_sequence, save_sequence
from ikpy.errors import IkpyError
from ikpy.gguf.atomic import replacing

if TYPE_CHECKING:
    from ikpy.engine.speculative import Drafter
    from ikpy.server.build import Server
    from ikpy.server.log import ServerLog
    from ikpy.server.scheduler import Engine
    from ikpy.server.slots import Slot

TOKENS_MAGIC = 1819112310
MEDIA_TOKEN = -1
"""Stands in lists of tokens for a row of a picture or a sound."""
AUTOSAVE = "autosave-{}-{:08x}"
"""Name of the file that keeps a slot of a model over a restart."""


def write_slot(folder: Path, name: str, engine: Engine, slot: Slot) -> int:
    """Writes the state and the tokens of a slot, each file as a whole; returns the bytes of the state.

    A drafter that cannot be written (which is logged) leaves no file. Raises OSError.
    """
    size = save_sequence(folder / name, engine.context, slot.id, slot.tokens)
    has_media, n_vocab = slot.holds_media, engine.context.model.hparams.n_vocab
    tokens = [token if token < n_vocab else MEDIA_TOKEN for token in slot.tokens]
    head = {"has_mtmd": has_media, "map_idx_to_media": [], "tokens": tokens, "magic": TOKENS_MAGIC, "version": 1}
    with replacing(folder / f"{name}.tokens.json") as file:
        file.write(json.dumps(head).encode())
    for path, drafter in draft_files(folder, name, slot):
        try:
            drafter.write_state(path)
        except Exception as error:
            log_error(engine.log, "write_slot", "drafter's cache not saved", error, slot)
            for written in written_draft_files(folder, name):
                with contextlib.suppress(OSError):
                    written.unlink()  # one that is older is of another text
    return size


def read_slot(folder: Path, name: str, engine: Engine, slot: Slot) -> int:
    """Replaces the text of a slot by a saved one; returns the bytes of the state.

    Drafters whose files are missing or do not fit (which is logged) go on behind the text. Raises OSError,
    FileFormatError, KVCacheFullError, which leaves the slot empty.
    """
    try:
        slot.tokens, size = load_sequence(folder / name, engine.context, slot.id, slot.n_ctx - 1)
    except KVCacheFullError:
        slot.truncate(0)
        raise
    for path, drafter in draft_files(folder, name, slot):
        try:
            drafter.read_state(path)
        except FileNotFoundError:
            continue  # saved without that drafter
        except Exception as error:
            log_error(engine.log, "read_slot", "drafter's cache not restored", error, slot)
    return size


def log_error(log: ServerLog, function: str, message: str, error: Exception, slot: Slot) -> None:
    """Logs what went wrong with a slot's file, in one line if it can be expected of files."""
    if isinstance(error, (OSError, IkpyError)):
        log.failure(function, message, id_slot=slot.id, error=str(error))
    else:
        log.caught(function, message, error, id_slot=slot.id)


def draft_files(folder: Path, name: str, slot: Slot) -> list[tuple[Path, Drafter]]:
    """Files beside a state file for the drafters that have caches of their own. No state file is called so."""
    drafters = slot.speculator.drafters if slot.speculator is not None else ()
    return [(draft_file(folder, name), drafter) for drafter in drafters if drafter.needs_states]


def draft_file(folder: Path, name: str) -> Path:
    """File of the prediction layer's cache beside a state file; those of further layers have a number behind it."""
    return folder / f".{name}.mtp"


def written_draft_files(folder: Path, name: str) -> list[Path]:
    """Files of the prediction layers' caches that are there."""
    first = draft_file(folder, name)
    names = chain([first], (first.with_name(f"{first.name}.{number}") for number in count(1)))
    return list(takewhile(Path.exists, names))


def autosave_file(server: Server, slot: Slot) -> Path:
    """File that keeps a slot over a restart. Servers of other models, or of other names for one, have others."""
    settings = server.front.settings
    name = "" if settings.alias == settings.model_path else settings.alias
    key = zlib.crc32(name.encode("utf-8", "surrogateescape"), server.front.model.fingerprint)
    return Path(settings.slot_save_path or "") / AUTOSAVE.format(slot.id, key)


def save_slots(server: Server) -> None:
    """Writes every slot that holds text, unless the engine did not end: then a batch may be at work on them. Nor if an
    error ended it: what its cache holds is unknown."""
    settings, engine = server.front.settings, server.engine
    if not settings.slot_autosave or settings.slot_save_path is None:
        return
    if engine.is_running:
        engine.log.failure("save_slots", "slots not saved", error="a batch has not ended")
        return
    if engine.failure is not None:
        engine.log.failure("save_slots", "slots not saved", error=engine.failure)
        return
    for slot in engine.slots:
        try:
            if slot.tokens:
                path = autosave_file(server, slot)
                write_slot(path.parent, path.name, engine, slot)
                engine.log.event("save_slots", "slot saved", id_slot=slot.id, n_saved=len(slot.tokens))
        except Exception as error:
            log_error(engine.log, "save_slots", "slot not saved", error, slot)


def restore_slots(server: Server) -> None:
    """Reads what `save_slots` wrote, once; what does not fit is left alone. The engine must not run."""
    settings, engine = server.front.settings, server.engine
    if not settings.slot_autosave or settings.slot_save_path is None:
        return
    for slot in engine.slots:
        path = autosave_file(server, slot)
        if not path.is_file():
            continue
        try:
            read_slot(path.parent, path.name, engine, slot)
            engine.log.event("restore_slots", "slot restored", id_slot=slot.id, n_restored=len(slot.tokens))
        except Exception as error:
            log_error(engine.log, "restore_slots", "slot not restored", error, slot)
            slot.truncate(0)
