"""Where the tokens of sequences go in the cache."""

import numpy as np
import pytest

from ikpy.engine.cells import BLOCK, Cells


def mask(*sequences):
    return sum(1 << s for s in sequences)


def add(cells, *sequences):
    """One token for every sequence, behind its latest; the cells they get."""
    masks = [mask(s) for s in sequences]
    found = cells.find(masks)
    assert len(found) == len(set(found)) == len(sequences)
    assert (cells.pos[found] < 0).all()
    pos = np.array([cells.pos[(cells.seq & np.uint64(m)) != 0].max(initial=-1) for m in masks]) + 1
    for i, s in enumerate(sequences):  # several tokens of one sequence
        pos[i] += sequences[:i].count(s)
    cells.fill(found, pos.tolist(), masks)
    return found


def blocks_of(cells, sequence):
    return set((np.flatnonzero(cells.seq & np.uint64(mask(sequence))) // BLOCK).tolist())


def test_a_single_sequence_fills_the_cells_in_order():
    cells = Cells(300)
    assert add(cells, *[0] * 10) == list(range(10))
    for i in range(10, 300):
        assert add(cells, 0) == [i]
    assert len(cells.find([1])) == 0


def test_sequences_that_grow_together_share_no_block():
    cells = Cells(8 * 2 * BLOCK)
    for s in range(8):
        add(cells, *[s] * (3 + s))
    for _ in range(BLOCK):
        add(cells, *range(8))
    blocks = [blocks_of(cells, s) for s in range(8)]
    assert all(len(own) == 2 for own in blocks)
    assert len(set().union(*blocks)) == 16


def test_one_batch_may_hold_prompts_and_single_tokens():
    cells = Cells(6 * BLOCK)
    add(cells, 0, 1)
    add(cells, 0, *[2] * 100, 1, *[3] * 5)
    assert not blocks_of(cells, 0) & blocks_of(cells, 1)
    assert not blocks_of(cells, 2) & (blocks_of(cells, 0) | blocks_of(cells, 1) | blocks_of(cells, 3))


def test_a_shortened_sequence_goes_on_in_its_block():
    cells = Cells(4 * BLOCK)
    add(cells, *[0] * 20)
    add(cells, *[1] * 20)
    cells.remove(0, 12, -1)
    assert add(cells, 0) == [12]


def test_a_shared_beginning_is_followed_by_a_block_of_its_own():
    cells = Cells(4 * BLOCK)
    add(cells, *[0] * 20)
    cells.share(0, 1, -1, 10)
    (cell,) = add(cells, 1)
    assert cell % BLOCK == 0 and cell >= BLOCK
    assert add(cells, 0) == [20]


def test_sequences_with_a_common_end_do_not_get_the_same_cell():
    cells = Cells(4 * BLOCK)
    add(cells, *[0] * 20)
    cells.share(0, 1, -1, -1)
    add(cells, 0, 1)
    assert cells.used == 22


@pytest.mark.parametrize("n_cells", [40, 2 * BLOCK, 3 * BLOCK + 32])
def test_every_cell_is_used_before_the_cache_is_full(n_cells):
    cells = Cells(n_cells)
    rng = np.random.default_rng(0)
    while cells.used < n_cells:
        add(cells, *rng.integers(0, 5, min(int(rng.integers(1, 9)), n_cells - cells.used)).tolist())
    assert len(cells.find([1, 2])) == 0
    cells.remove(3, -1, -1)
    free = n_cells - cells.used
    add(cells, *[4] * free)
    assert cells.used == n_cells


def test_too_few_cells_are_all_that_is_found():
    cells = Cells(BLOCK)
    add(cells, *[0] * (BLOCK - 3))
    assert sorted(cells.find([2] * 5)) == [BLOCK - 3, BLOCK - 2, BLOCK - 1]


def test_interrupted_removals_can_be_made_again():
    class Interrupted(Cells):
        is_whole = False

        def empty(self, cells):
            if not self.is_whole:
                raise KeyboardInterrupt
            super().empty(cells)

    cells = Interrupted(2 * BLOCK)
    add(cells, *[0] * 10)
    cells.share(0, 1, -1, 4)
    with pytest.raises(KeyboardInterrupt):
        cells.remove(0, -1, -1)
    assert ((cells.pos >= 0) == (cells.seq != 0)).all()
    cells.is_whole = True
    cells.remove(0, -1, -1)
    assert cells.used == 4 and (cells.seq[cells.pos >= 0] == mask(1)).all()
