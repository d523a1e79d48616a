"""Pictures and sounds of texts in state files: keys of their contents, by which other processes know them.

The header of such a file has ``media``: the projector, and of every picture key, rows, grid, whether its rows see each
other, and rows plus turn. Its tokens from n_vocab on count the rows of these pictures.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from ikpy.engine.media import MAX_ID, MediaStore, Picture
from ikpy.errors import FileFormatError

if TYPE_CHECKING:
    from ikpy.engine.context import Context

PROJECTOR = "another projector (--mmproj), other limits of pictures' tokens, another version of ikpy, or without one"


def picture_store(context: Context) -> MediaStore | None:
    """Where ids of pictures and sounds have their rows, if the context has such."""
    store = context.params.media
    return None if store is None or store.holds_texts else store


def media_header(context: Context, tokens: list[int]) -> dict[str, Any]:
    """What a header says of the tokens of a text."""
    store = picture_store(context)
    if store is None or not store.has_media(tokens):
        return {"tokens": tokens}
    pictures = store.pictures_of(tokens)
    starts = [picture.start for _, picture in pictures]
    ids = _renumbered(tokens, store.n_vocab, starts, _numbers_of_files(store.n_vocab, pictures))
    listed = [[key.hex(), p.n, p.grid, p.both_ways, p.n + p.turn] for key, p in pictures]
    return {"tokens": ids, "media": {"projector": store.projector, "pictures": listed}}


def check_tokens(context: Context, header: dict[str, Any]) -> None:
    """ValueError, KeyError or TypeError for tokens or pictures that no context writes."""
    tokens, n_vocab, store = header["tokens"], context.model.hparams.n_vocab, context.params.media
    end = store.end if store is not None and store.holds_texts else n_vocab
    if "media" in header:
        end = n_vocab + _checked_rows([picture for _, picture in _pictures(header)], tokens, context)
    elif any(a < n_vocab <= b for a, b in pairwise(tokens)):  # a text for the encoder is what a sequence begins with
        raise ValueError
    if tokens and not 0 <= min(tokens) <= max(tokens) < end:
        raise ValueError


def _checked_rows(pictures: list[Picture], tokens: list[int], context: Context) -> int:
    """Rows of all pictures. ValueError if one is larger than a context, or no token of the text stands for one."""
    ends = np.cumsum([picture.n for picture in pictures], dtype=np.int64)
    rows = np.array(tokens, np.int64) - context.model.hparams.n_vocab
    used = np.unique(np.searchsorted(ends, rows[rows >= 0], "right"))
    if any(picture.n > context.n_ctx for picture in pictures) or len(used) < len(pictures):
        raise ValueError
    return int(ends[-1]) if pictures else 0


def other_projector(context: Context, header: dict[str, Any]) -> bool:
    """Whether a state holds rows of another projector than the context's."""
    store = picture_store(context)
    return "media" in header and (store is None or header["media"]["projector"] != store.projector)


def known_tokens(context: Context, header: dict[str, Any]) -> list[int]:
    """The tokens of a checked header, with the ids that its pictures have here. ResourceError if all are taken,
    FileFormatError if one of its pictures is known in another shape."""
    store = picture_store(context)
    if store is None or "media" not in header:
        return list(header["tokens"])
    pictures = _pictures(header)
    try:
        starts = store.announce(pictures)
    except ValueError:
        raise FileFormatError("the state holds a picture or a sound that has other rows here") from None
    return _renumbered(header["tokens"], store.n_vocab, _numbers_of_files(store.n_vocab, pictures), starts)


def _numbers_of_files(n_vocab: int, pictures: list[tuple[bytes, Picture]]) -> list[int]:
    """First numbers of pictures in a file, where their rows are counted from n_vocab on."""
    return list(accumulate((picture.n for _, picture in pictures[:-1]), initial=n_vocab))


def _renumbered(tokens: list[int], n_vocab: int, old: list[int], new: list[int]) -> list[int]:
    """Tokens whose pictures, which began at the ids `old` (rising), begin at the ids `new`."""
    ids = np.array(tokens, np.int64)
    rows = ids >= n_vocab
    place = np.searchsorted(old, ids[rows], "right") - 1
    ids[rows] += (np.array(new, np.int64) - np.array(old, np.int64))[place]
    return list(map(int, ids))


def _pictures(header: dict[str, Any]) -> list[tuple[bytes, Picture]]:
    """Keys and shapes of the pictures, without ids. ValueError, KeyError or TypeError if they are none."""
    if not isinstance(header["media"]["projector"], str):
        raise TypeError
    found = []
    for key, n, grid, both_ways, turned in header["media"]["pictures"]:
        numbers = [n, turned, *(grid or [])]
        if not all(type(value) is int and 0 <= value <= MAX_ID for value in numbers) or type(both_ways) is not bool:
            raise TypeError
        if n < 1 or turned > n + bool(grid):
            raise ValueError
        if grid is not None and (len(grid) != 2 or not all(grid) or max(grid) > n):
            raise ValueError
        found.append((bytes.fromhex(key), Picture(0, n, None if grid is None else tuple(grid), both_ways, turned - n)))
    return found
