"""Ids of pictures' rows: who gets which, what is kept, where texts may be cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from ikpy.engine import media
from ikpy.engine.media import MAX_ID, MediaStore
from ikpy.engine.sampling_params import SamplingParams
from ikpy.errors import ResourceError
from ikpy.server.context_fit import ContextFit
from ikpy.server.params import GenerationParams
from ikpy.vision.rows import MediaRows

N_VOCAB, WIDTH = 100, 4


def rows(n: int, grid: tuple[int, int] | None = None, *, both_ways: bool = False) -> Callable[[], MediaRows]:
    """An encoder of one picture."""
    return lambda: MediaRows(np.full((n, WIDTH), n, np.float32), grid, both_ways)


def test_a_picture_has_its_ids_for_ever() -> None:
    """Rows that had to go are made again; those of kept ones are not."""
    made: list[str] = []

    def make(name: str, n: int) -> Callable[[], MediaRows]:
        def encode() -> MediaRows:
            made.append(name)
            return rows(n)()

        return encode

    store = MediaStore(N_VOCAB, 10 * WIDTH * 4)
    first = store.add(b"a", make("a", 4))
    assert first == [100, 101, 102, 103] and store.end == 104
    assert store.add(b"b", make("b", 5)) == [104, 105, 106, 107, 108]
    assert store.add(b"a", make("a", 4)) == first and made == ["a", "b"]
    assert store.add(b"c", make("c", 6)) == [109, 110, 111, 112, 113, 114]
    assert store.n_bytes == 10 * WIDTH * 4, "the picture used longest ago went"
    with pytest.raises(ResourceError, match="rows of a picture or a sound are no longer kept"):
        store.rows(104)
    assert store.add(b"a", make("a", 4)) == first and made == ["a", "b", "c"]
    assert store.add(b"b", make("b", 5)) == [104, 105, 106, 107, 108] and made[3:] == ["b"]
    assert store.add(b"d", make("d", 30))[0] == 115 and store.rows(115).shape == (30, WIDTH), "the last one is kept"
    assert store.n_bytes == 30 * WIDTH * 4


def test_pictures_of_saved_texts_are_announced() -> None:
    """They have ids before their rows are made, and those of one key are one picture."""
    store = MediaStore(N_VOCAB, 1 << 20)
    store.add(b"a", rows(4))
    store.add(b"b", rows(6, (2, 3)))
    (_, two), *_ = store.pictures_of([105, 1, 107])
    assert [key for key, _ in store.pictures_of([1, 108, 100, 2, 101])] == [b"a", b"b"]
    other = MediaStore(N_VOCAB, 1 << 20)
    other.add(b"c", rows(3))
    assert other.announce([(b"b", two)]) == [103]
    ids = list(range(103, 109))
    assert other.has_media(ids) and other.n_bytes == 3 * WIDTH * 4
    with pytest.raises(ResourceError, match="no longer kept"):
        other.rows(103)
    assert other.add(b"b", rows(6, (2, 3))) == ids and len(other.rows(103)) == 6
    assert other.announce([(b"b", two)]) == [103] and other.end == 109
    with pytest.raises(ValueError, match="another shape"):
        other.announce([(b"d", two), (b"c", two)])
    with pytest.raises(ValueError, match="one key"):
        other.announce([(b"d", two), (b"d", two)])
    with pytest.raises(ResourceError, match="are taken"):
        other.announce([(b"d", two), (b"e", replace(two, n=MAX_ID))])
    assert other.end == 109, "all or none"


def test_failures_leave_no_ids() -> None:
    store = MediaStore(N_VOCAB, 1 << 20)

    def broken() -> MediaRows:
        raise ResourceError("cannot decode")

    for make, error in ((broken, ResourceError), (rows(0), ValueError)):
        with pytest.raises(error):
            store.add(b"a", make)
    assert store.add(b"a", rows(3)) == [100, 101, 102]
    store._rows.clear()
    with pytest.raises(ValueError, match="rows of another shape under one key"):
        store.add(b"a", rows(4))


def test_ids_come_to_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches have room for 32 bits; pictures that have ids keep them."""
    monkeypatch.setattr(media, "MAX_ID", 109)
    store = MediaStore(N_VOCAB, 1 << 20)
    first = store.add(b"a", rows(7))
    with pytest.raises(ResourceError, match="all 9 ids of rows of pictures and sounds are taken: start anew"):
        store.add(b"b", rows(4))
    assert store.add(b"c", rows(3)) == [107, 108, 109]
    assert store.add(b"a", rows(7)) == first


def test_a_picture_that_two_threads_make_counts_once() -> None:
    store, kept = MediaStore(N_VOCAB, 20 * WIDTH * 4), rows(6)

    def make() -> MediaRows:
        store.add(b"a", kept)  # as another thread meanwhile
        return kept()

    assert store.add(b"a", make) == store.add(b"a", kept) == [100, 101, 102, 103, 104, 105]
    assert store.end == 106 and len(store.table()) == 1 and store.n_bytes == 6 * WIDTH * 4


def test_positions_behind_pictures() -> None:
    """A picture counts when all of it is there, with the larger side of its grid."""
    store = MediaStore(N_VOCAB, 1 << 20)
    wide, plain, high = (
        store.add(key, make)
        for key, make in ((b"wide", rows(12, (2, 6))), (b"plain", rows(5)), (b"high", rows(3, (3, 1))))
    )
    text = [1, 2, *wide, 3, *plain, *high, *wide, 4]
    expected = [0] * 14 + [-6] * (len(text) - 14 - 1) + [-12, -12]
    assert [store.turn(text[:n]) for n in range(len(text) + 1)] == expected
    assert store.turn([]) == store.turn([1, 2, 3]) == 0
    assert [store.is_media(token) for token in (0, 99, 100, store.end - 1, store.end)] == [0, 0, 1, 1, 0]
    assert not store.has_media([]) and not store.has_media([99]) and store.has_media([5, 100])


def test_cuts() -> None:
    """Not between rows that see each other; all of a picture where even its first rows are too many."""
    store = MediaStore(N_VOCAB, 1 << 20)
    seen, plain = store.add(b"seen", rows(6, both_ways=True)), store.add(b"plain", rows(4))
    text = [1, 2, *seen, *seen, 3, *plain, 4]
    cuts = [store.cut(text, n) for n in range(len(text) + 3)]
    assert cuts == [0, 1, 2, *[2] * 5, 8, *[8] * 5, 14, 15, 16, 17, 18, 19, 20, 20, 20]
    assert [store.cut(text[2:], n) for n in (1, 5, 6, 7)] == [6, 6, 6, 6]
    assert [store.cut(text[4:], n) for n in (1, 3, 4)] == [4, 4, 4], "the rest of one"


def test_what_is_kept_of_a_text() -> None:
    """A picture in which it ends, if there is room for it."""
    store = MediaStore(N_VOCAB, 1 << 20)
    picture = store.add(b"picture", rows(6))
    text = [1, 2, *picture, *picture, 3, 4]
    assert [store.kept_whole(text, n, 20) for n in range(17)] == [0, 1, 2, *[8] * 6, *[14] * 6, 15, 16]
    assert [store.kept_whole(text, n, 8) for n in (3, 8, 9, 13)] == [8, 8, 9, 13]


@pytest.mark.parametrize(
    ("n_ctx", "n_keep", "n_discard", "shift"),
    [
        (40, 2, 0, (2, 38, 19)),  # what is dropped ends behind the pictures
        (40, 2, 3, (2, 38, 6)),  # in the first one, which goes as a whole
        (40, 3, 0, (8, 32, 16)),  # what is kept ends in it
        (40, 9, 2, (14, 26, 2)),
        (17, 9, 2, (8, 9, 6)),  # in the second one, which leaves no room
        (40, -1, 0, (20, 20, 10)),
    ],
)
def test_full_contexts(n_ctx: int, n_keep: int, n_discard: int, shift: tuple[int, int, int]) -> None:
    store = MediaStore(N_VOCAB, 1 << 20)
    picture = store.add(b"picture", rows(6))
    text = [1, 2, *picture, *picture, *range(40)][:n_ctx]
    fit = ContextFit(n_ctx, may_shift=True, add_bos=False)
    params = GenerationParams(SamplingParams(), n_keep=n_keep, n_discard=n_discard)
    assert fit.shift(text, text[:20], params, store) == shift
