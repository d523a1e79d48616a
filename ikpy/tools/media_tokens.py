"""Pictures and sounds in texts: what projectors make of them becomes tokens, of which texts are put together."""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias
from weakref import WeakValueDictionary

from ikpy.errors import UsageError
from ikpy.tools.media_marks import MARKER
from ikpy.tools.sounds import Sound

if TYPE_CHECKING:
    from ikpy.backends.cuda.api import Device
    from ikpy.engine.media import MediaStore
    from ikpy.engine.model import Model
    from ikpy.engine.params import ModelParams
    from ikpy.gguf.reader import GGUFFile
    from ikpy.sound.projector import SoundProjector
    from ikpy.tools.media import Media
    from ikpy.vision.projector import Projector
    from ikpy.vision.rows import MediaRows
    from ikpy.vocab import Vocab

STORE_BYTES = 512 << 20
"""Of the rows that a server keeps; a picture of gemma3 has 2.5 MiB, one of 4096 tokens for 8192 channels 128."""
ONE_TEXT_BYTES = 16 << 30
"""Of the rows of a text that is evaluated as a whole; no more is taken than there are."""
HEAD_BYTES = 1 << 18
"""Of a projector file, which its keys do not exceed."""
MOST_LAYOUTS = 4096
"""Pictures and sounds whose tokens are remembered."""
NO_MEDIA = "{} input is not supported - hint: if this is unexpected, you may need to provide the mmproj"


class PictureEncoder(Protocol):
    """The part of a projector that is used. n_deep: further parts of rows."""

    n_deep: int

    def encode(self, content: Any, /) -> Sequence[str | MediaRows]: ...


class SoundEncoder(Protocol):
    """The part of a projector of sound that is used."""

    def encoded(self, content: Any, /) -> Iterator[str | MediaRows]: ...

    def n_rows(self, n_samples: int, /) -> int: ...


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


class MediaReader:
    """Gives pictures and sounds the tokens of a text model, if there is a projector of theirs. n_deep: further parts of
    rows that the model reads, which sounds have not, and pictures of some files. One thread at a time may use it."""

    def __init__(
        self,
        projector: PictureEncoder | None,
        store: MediaStore,
        vocab: Vocab,
        sounds: SoundEncoder | None = None,
        n_deep: int = 0,
    ) -> None:
        self.store = store
        self._projector = projector
        self._sounds = sounds
        self._missing = {"image": n_deep - (projector.n_deep if projector else 0), "audio": n_deep}
        self._vocab = vocab
        self._layouts: OrderedDict[bytes, Layout] = OrderedDict()
        self._running: WeakValueDictionary[bytes, Generator[None, None, None]] = WeakValueDictionary()
        """Steps that somebody holds."""

    @property
    def takes(self) -> dict[str, bool]:
        """Whether there is a projector for each kind of `Media.what`."""
        return {"image": self._projector is not None, "audio": self._sounds is not None}

    def check(self, media: Media) -> None:
        """UsageError if there is no projector for it."""
        if not self.takes[media.what]:
            raise UsageError(NO_MEDIA.format(media.what))

    def encode(self, media: Media) -> Sequence[str | MediaRows]:
        """Rows of a picture or a sound and the text around them. Raises UsageError without a projector for it."""
        return list(self._encoded(media))

    def _encoded(self, media: Media) -> Iterator[str | MediaRows]:
        """What `encode` gives; the pieces of a sound are encoded one after the other."""
        self.check(media)
        pieces: Iterable[str | MediaRows]
        if media.what == "image":
            assert self._projector is not None
            pieces = self._projector.encode(media.content())
        else:
            assert self._sounds is not None
            pieces = self._sounds.encoded(media.content())
        missing = self._missing[media.what]
        for piece in pieces:
            yield piece if isinstance(piece, str) or not missing else piece.widened(missing)

    def tokens(self, parts: Sequence[str | Media], n_ubatch: int, *, add_special: bool = True) -> list[int]:
        """Ids of texts and media in turn; of every text by itself. ``add_special``: with begin and end tokens.

        Those are encoded that were not seen before; of others the rows may be gone (see `refresh`). Raises
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

    def least(self, parts: Sequence[str | Media]) -> int:
        """Tokens that `tokens` would give at least: of pictures and sounds without those of the text around them, and
        none of pictures that were not seen. Nothing is encoded."""
        vocab = self._vocab
        n_special = bool(vocab.add_bos and vocab.bos is not None) + bool(vocab.add_eos and vocab.eos is not None)
        found = (len(self._text(part)) if isinstance(part, str) else self._least(part) for part in parts)
        return n_special + sum(found)

    def _least(self, media: Media) -> int:
        if (layout := self._layouts.get(media.key)) is not None:
            return sum(len(item.ids) if isinstance(item, Run) else len(item) for item in layout)
        n_samples = media.n_samples if isinstance(media, Sound) else None
        return 0 if n_samples is None or self._sounds is None else self._sounds.n_rows(n_samples)

    def _text(self, text: str) -> list[int]:
        return self._vocab.tokenize(text, add_special=False, parse_special=True)

    def steps(self, media: Media) -> Iterator[None]:
        """Encodes a picture or a sound that is not known, of a sound a piece at every step. Who asks meanwhile takes
        part in the same steps."""
        steps = self._running.get(media.key)
        if steps is None:
            steps = self._running[media.key] = self._encode_steps(media)
        return steps

    def _encode_steps(self, media: Media) -> Generator[None, None, None]:
        """The steps of `steps`."""
        if media.key in self._layouts:
            return
        items: Layout = []
        for place, piece in enumerate(self._encoded(media)):
            items.append(self._item(media.key, place, piece))
            if media.what == "audio" and not isinstance(piece, str):
                yield
        self._layouts[media.key] = items
        if len(self._layouts) > MOST_LAYOUTS:
            self._layouts.popitem(last=False)

    def _seen(self, media: Media) -> Layout:
        """The layout of a picture or a sound, which is encoded if it is not known."""
        while media.key not in self._layouts:
            for _ in self.steps(media):
                pass
        self._layouts.move_to_end(media.key)
        return self._layouts[media.key]

    def _item(self, key: bytes, place: int, piece: str | MediaRows) -> list[int] | Run:
        """Tokens of a piece of a picture or a sound."""
        if isinstance(piece, str):
            return self._text(piece)
        own = key + place.to_bytes(4, "little")
        return Run(own, self.store.add(own, lambda: piece), piece.both_ways, piece.values.nbytes)

    def refresh(self, media: Sequence[Media], tokens: Sequence[int] | None = None) -> None:
        """Makes the rows of media that are not there any more; only those that ``tokens`` stand for, if given."""
        wanted = None if tokens is None else {token for token in tokens if self.store.is_media(token)}
        for one in media:
            again = _Again(self, one)
            for place, item in enumerate(self._seen(one)):
                if isinstance(item, Run) and (wanted is None or not wanted.isdisjoint(item.ids)):
                    self.store.add(item.key, partial(again.rows, place))

    def fitting(self, media: Sequence[Media], tokens: Sequence[int], taken: int) -> tuple[int, int]:
        """How many of these tokens find their rows in the store at the same time, beside ``taken`` bytes of others, and
        the bytes of their rows. Those that are made together stay together; some always fit if nothing is taken."""
        runs = {item.ids[0]: item for one in media for item in self._seen(one) if isinstance(item, Run) and item.ids}
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

    def shown(self, tokens: Sequence[int]) -> list[int]:
        """Tokens of the vocabulary that a prompt is shown as."""
        return self.store.without(tokens)

    def text(self, tokens: Sequence[int]) -> str:
        """Text of tokens, with a marker for rows that follow each other."""
        groups = groupby(tokens, self.store.is_media)
        return "".join(MARKER if is_media else self._vocab.detokenize(list(part)) for is_media, part in groups)


class _Again:
    """The rows of media that are encoded once more, at most once for all of them."""

    def __init__(self, reader: MediaReader, media: Media) -> None:
        self._reader = reader
        self._media = media
        self._pieces: Sequence[str | MediaRows] = ()

    def rows(self, place: int) -> MediaRows:
        """Rows of the piece at a place."""
        self._pieces = self._pieces or self._reader.encode(self._media)
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


@dataclass(frozen=True)
class Encoders:
    """The projectors of a file, of pictures and of sounds."""

    pictures: Projector | None = None
    sounds: SoundProjector | None = None
    fingerprint: str = ""
    """Tells files and limits of pictures' tokens apart, which give a picture other rows."""

    @property
    def device_bytes(self) -> dict[str, int]:
        """Bytes that they take of devices, by their names."""
        found = Counter[str]()
        for each in filter(None, (self.pictures, self.sounds)):
            found.update(each.device_bytes)
        return dict(found)

    def take_memory(self, log: Callable[[str], None]) -> None:
        """Brings the weights to devices and makes room for the largest picture and sound."""
        for each in filter(None, (self.pictures, self.sounds)):
            each.take_memory(log)


def projector_fingerprint(path: str, options: ProjectorOptions) -> str:
    """Of the keys and every tensor of a file, the limits of pictures' tokens and what makes rows of them."""
    from ikpy import __version__
    from ikpy.gguf.fingerprint import weights_fingerprint
    from ikpy.gguf.reader import GGUFFile

    with open(path, "rb") as file:
        head = zlib.crc32(file.read(HEAD_BYTES))
    with GGUFFile.open(path) as gguf:
        weights = weights_fingerprint(gguf, most=None)
    return f"{head:08x} {weights:08x} {options.min_tokens} {options.max_tokens} {__version__}"


def open_beside(
    path: str, file: GGUFFile, vocab: Vocab, params: ModelParams, options: ProjectorOptions, log: Callable[[str], None]
) -> tuple[Encoders, ModelParams]:
    """The projectors of a file for the text model in another, and the parameters to load that with: its placement
    leaves what they take of a device. Raises an IkpyError with one line."""
    from ikpy.backends.cuda.encoder_runtime import EncoderRuntime
    from ikpy.gguf.reader import GGUFFile
    from ikpy.models.keys import Keys
    from ikpy.sound.projector import known_encoders, open_sound_projector
    from ikpy.vision.projector import open_projector

    def runtime() -> EncoderRuntime | None:
        device = options.device
        return EncoderRuntime(device, params.devices, log, plan_only=params.header_only) if device else None

    def has_token(text: str) -> bool:
        return len(vocab.tokenize(text, add_special=False, parse_special=True)) == 1

    with GGUFFile.open(path, header_only=True) as header:
        found = known_encoders(header, log)
    keys, n_threads = Keys(file, params.kv_overrides), options.n_threads
    n_embd = keys.u32("embedding_length")
    pictures = sounds = None
    if "vision" in found:
        pictures = open_projector(
            path,
            n_embd=n_embd,
            n_threads=n_threads,
            log=log,
            min_tokens=options.min_tokens,
            max_tokens=options.max_tokens,
            has_token=has_token,
            device=runtime(),
        )
        _check_places(pictures, keys.arch)
    if "audio" in found:
        sounds = open_sound_projector(
            path, n_embd=n_embd, n_threads=n_threads, log=log, has_token=has_token, device=runtime()
        )
    encoders = Encoders(pictures, sounds, projector_fingerprint(path, options))
    return encoders, replace(params, placement=replace(params.placement, taken=tuple(encoders.device_bytes.items())))


def new_reader(
    encoders: Encoders, model: Model, vocab: Vocab, log: Callable[[str], None], n_bytes: int | None = None
) -> MediaReader:
    """A reader with a store for so many bytes of rows; takes the memory of the projectors' devices.

    UsageError for pictures with features for other layers than the model's. With none they are read: Qwen3-Omni's files
    of llama.cpp have none.
    """
    from ikpy.engine.media import MediaStore

    pictures, n_deep = encoders.pictures, model.arch.n_deep
    if pictures and pictures.n_deep not in (0, n_deep):
        raise UsageError(
            f"{pictures.path}: pictures have features for {pictures.n_deep} layers, the text model takes those for "
            f"{n_deep} (n_deepstack_layers, deepstack_mapping): convert both from one checkpoint"
        )
    encoders.take_memory(log)
    store = MediaStore(model.hparams.n_vocab, n_bytes or ONE_TEXT_BYTES, encoders.fingerprint)
    return MediaReader(encoders.pictures, store, vocab, encoders.sounds, n_deep)


def _check_places(pictures: Projector, name: str) -> None:
    """UsageError if text models of an architecture rotate rows by places in a grid, but not those of the pictures."""
    from ikpy.models import architecture

    arch = architecture(name)
    if pictures.has_grids and arch.reads_grids and pictures.counted != arch.counts_pictures:
        kinds = "M-RoPE", "XD-RoPE"
        raise UsageError(
            f"{pictures.path} makes rows with the positions of {kinds[pictures.counted]}, the text model ({name}) "
            f"wants those of {kinds[arch.counts_pictures]}: it is another model's"
        )
