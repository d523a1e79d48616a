"""Pictures in texts: what a projector makes of them becomes tokens, of which texts are put together."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Protocol, TypeAlias

from ikpy.errors import UsageError
from ikpy.tools.picture_marks import MARKER

if TYPE_CHECKING:
    from ikpy.backends.cuda.api import Device
    from ikpy.engine.media import MediaStore
    from ikpy.engine.model import Model
    from ikpy.engine.params import ModelParams
    from ikpy.gguf.reader import GGUFFile
    from ikpy.tools.pictures import Picture, Pixels
    from ikpy.vision.projector import Projector
    from ikpy.vision.rows import MediaRows
    from ikpy.vocab import Vocab

STORE_BYTES = 512 << 20
"""Of the rows that a server keeps; a picture of gemma3 has 2.5 MiB, one of 4096 tokens for 8192 channels 128."""
ONE_TEXT_BYTES = 16 << 30
"""Of the rows of a text that is evaluated as a whole; no more is taken than there are."""
MOST_LAYOUTS = 4096
"""Pictures whose tokens are remembered."""


class Encoder(Protocol):
    """The part of a projector that is used."""

    def encode(self, image: Pixels) -> Sequence[str | MediaRows]: ...


@dataclass(frozen=True)
class Run:
    """Tokens ``ids`` of consecutive rows that are made together; ``both_ways``: they see each other. ``n_bytes``: of
    the rows."""

    key: bytes
    ids: Sequence[int]
    both_ways: bool
    n_bytes: int


Layout: TypeAlias = list[list[int] | Run]
"""Tokens of the texts and rows of a picture in turn."""


class PictureReader:
    """Gives pictures the tokens of a text model. One thread at a time may use it."""

    def __init__(self, projector: Encoder, store: MediaStore, vocab: Vocab) -> None:
        self.store = store
        self._projector = projector
        self._vocab = vocab
        self._layouts: OrderedDict[bytes, Layout] = OrderedDict()

    def tokens(self, parts: Sequence[str | Picture], n_ubatch: int, *, add_special: bool = True) -> list[int]:
        """Ids of texts and pictures in turn; of every text by itself. ``add_special``: with begin and end tokens.

        Pictures are encoded that were not seen before; of others the rows may be gone (see `refresh`). Raises
        UsageError for a picture whose rows see each other and do not fit a micro-batch.
        """
        vocab, found = self._vocab, list[int]()
        if add_special and vocab.add_bos and vocab.bos is not None:
            found.append(vocab.bos)
        for part in parts:
            if isinstance(part, str):
                found += self._text(part)
                continue
            for item in self._seen(part):
                found += item.ids if isinstance(item, Run) else item
                if isinstance(item, Run) and item.both_ways and len(item.ids) > n_ubatch:
                    n = len(item.ids)
                    raise UsageError(f"the {n} tokens of a picture do not fit a micro-batch of {n_ubatch}: raise -ub")
        if add_special and vocab.add_eos and vocab.eos is not None:
            found.append(vocab.eos)
        return found

    def _text(self, text: str) -> list[int]:
        return self._vocab.tokenize(text, add_special=False, parse_special=True)

    def _seen(self, picture: Picture) -> Layout:
        """The layout of a picture, which is encoded if it is not known."""
        if picture.key in self._layouts:
            self._layouts.move_to_end(picture.key)
        else:
            pieces = self._projector.encode(picture.pixels())
            items = [self._item(picture.key, place, piece) for place, piece in enumerate(pieces)]
            self._layouts[picture.key] = items
            if len(self._layouts) > MOST_LAYOUTS:
                self._layouts.popitem(last=False)
        return self._layouts[picture.key]

    def _item(self, key: bytes, place: int, piece: str | MediaRows) -> list[int] | Run:
        """Tokens of a piece of a picture."""
        if isinstance(piece, str):
            return self._text(piece)
        own = key + place.to_bytes(4, "little")
        return Run(own, self.store.add(own, lambda: piece), piece.both_ways, piece.values.nbytes)

    def refresh(self, pictures: Sequence[Picture], tokens: Sequence[int] | None = None) -> None:
        """Makes the rows of pictures that are not there any more; only those that ``tokens`` stand for, if given."""
        wanted = None if tokens is None else {token for token in tokens if self.store.is_media(token)}
        for picture in pictures:
            again = _Again(self._projector, picture)
            for place, item in enumerate(self._seen(picture)):
                if isinstance(item, Run) and (wanted is None or not wanted.isdisjoint(item.ids)):
                    self.store.add(item.key, partial(again.rows, place))

    def fitting(self, pictures: Sequence[Picture], tokens: Sequence[int], taken: int) -> tuple[int, int]:
        """How many of these tokens find their rows in the store at the same time, beside ``taken`` bytes of others, and
        the bytes of their rows. Those that are made together stay together; some always fit if nothing is taken."""
        runs = {item.ids[0]: item for p in pictures for item in self._seen(p) if isinstance(item, Run) and item.ids}
        starts = sorted(runs)
        n_bytes, known = 0, -1
        for place, token in enumerate(tokens):
            if not self.store.is_media(token):
                continue
            start = starts[bisect_right(starts, token) - 1]
            if start != known:
                if taken + n_bytes and taken + n_bytes + runs[start].n_bytes > STORE_BYTES:
                    return place, n_bytes
                n_bytes, known = n_bytes + runs[start].n_bytes, start
        return len(tokens), n_bytes

    def text(self, tokens: Sequence[int]) -> str:
        """Text of tokens, with a marker for rows that follow each other."""
        groups = groupby(tokens, self.store.is_media)
        return "".join(MARKER if is_media else self._vocab.detokenize(list(part)) for is_media, part in groups)


class _Again:
    """The rows of a picture that is encoded once more, at most once for all of them."""

    def __init__(self, projector: Encoder, picture: Picture) -> None:
        self._projector = projector
        self._picture = picture
        self._pieces: Sequence[str | MediaRows] = ()

    def rows(self, place: int) -> MediaRows:
        """Rows of the piece at a place."""
        self._pieces = self._pieces or self._projector.encode(self._picture.pixels())
        piece = self._pieces[place]
        assert not isinstance(piece, str)
        return piece


@dataclass(frozen=True)
class ProjectorOptions:
    """min_tokens, max_tokens: rows of a picture, for projectors that keep its proportions. device: where pictures are
    encoded, None: on the CPU."""

    n_threads: int
    min_tokens: int | None = None
    max_tokens: int | None = None
    device: Device | None = None


def picture_device(
    params: ModelParams, offload: bool | None, log: Callable[[str], None], name: str | None = None
) -> Device | None:
    """Where pictures are encoded beside a model, None: on the CPU. Arguments as of `encoder_device`."""
    from ikpy.backends.cuda.devices import encoder_device

    return encoder_device(params.placement, params.devices, offload=offload, name=name, log=log)


def open_beside(
    path: str, file: GGUFFile, vocab: Vocab, params: ModelParams, options: ProjectorOptions, log: Callable[[str], None]
) -> tuple[Projector, ModelParams]:
    """The projector of a file for the text model in another, and the parameters to load that with: its placement
    leaves what the projector takes of a device. Raises an IkpyError with one line."""
    from ikpy.backends.cuda.encoder_runtime import EncoderRuntime
    from ikpy.models.keys import Keys
    from ikpy.vision.projector import open_projector

    device = options.device
    runtime = EncoderRuntime(device, params.devices, log, plan_only=params.header_only) if device else None
    projector = open_projector(
        path,
        n_embd=Keys(file, params.kv_overrides).u32("embedding_length"),
        n_threads=options.n_threads,
        log=log,
        min_tokens=options.min_tokens,
        max_tokens=options.max_tokens,
        has_token=lambda text: len(vocab.tokenize(text, add_special=False, parse_special=True)) == 1,
        device=runtime,
    )
    return projector, replace(params, placement=replace(params.placement, taken=tuple(projector.device_bytes.items())))


def new_reader(
    projector: Projector, model: Model, vocab: Vocab, log: Callable[[str], None], n_bytes: int | None = None
) -> PictureReader:
    """A reader with a store for so many bytes of rows; takes the memory of the projector's device."""
    from ikpy.engine.media import MediaStore

    projector.take_memory(log)
    return PictureReader(projector, MediaStore(model.hparams.n_vocab, n_bytes or ONE_TEXT_BYTES), vocab)
