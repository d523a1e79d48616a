"""Ops of sparse attention: the choice of cells, masks and lists of it, and cells that stand for stretches."""

from __future__ import annotations

from ikpy.graph.elementwise import ElementwiseOps
from ikpy.graph.ir import F16, I32, I64, Value


class ChoiceOps(ElementwiseOps):
    """A mask of two values is what `Graph.kq_mask` makes."""

    def choose_cells(self, q: Value, weights: Value, keys: Value, mask: tuple[Value, Value], top_k: int) -> Value:
        """The cells that each token attends to, i32 [1 + top_k, T]: their number, or -1 for all, then the cells in
        rising order.

        The top_k visible cells s with the largest sum_h weights[h, t] relu(q[:, h, t] . keys[:, s]) (DeepSeek-V3.2,
        arXiv:2512.02556), the first ones where scores are equal; all where a token sees no more. q f32 [n, H, T],
        weights f32 [H, T], keys [n, 1, n_kv] of any cache type.
        """
        if q.shape[0] != keys.shape[0] or keys.shape[1] != 1 or weights.shape[:2] != q.shape[1:3] or top_k < 1:
            raise ValueError(f"choice of {top_k} by q {q.shape}, weights {weights.shape}, keys {keys.shape}")
        dst = self.new(1 + top_k, q.shape[2], type_id=I32)
        return self._emit("choose_cells", dst, [q, weights, keys, *mask])

    def chosen_mask(self, mask: Value, chosen: Value, n_cells: int, first: int = 0) -> Value:
        """The first n_cells of every row of a mask, with all cells from `first` on hidden that a token did not choose.

        Chosen cells are counted from there; with `first` all n_cells are looked at, not only those that are attended.
        """
        dst = self.new(n_cells, mask.shape[1], type_id=F16)
        return self._emit("chosen_mask", dst, [mask, chosen], ip=[first])

    def chosen_list(self, mask: Value, chosen: Value, first: int, most: int) -> Value:
        """The cells that each token attends to as those of choose_cells, i32 [1 + most + top_k, T].

        Those before `first` that its mask shows, `most` at most, and the chosen ones, which are counted from there on.
        """
        dst = self.new(chosen.shape[0] + most, chosen.shape[1], type_id=I32)
        return self._emit("chosen_list", dst, [mask, chosen], ip=[first])

    def stretch_cells(
        self, chosen: Value, ends: Value, mask: tuple[Value, Value], cell_pos: Value, pos: Value, ratio: int
    ) -> Value:
        """The cells that each token attends to as those of choose_cells, i32 [ratio * (1 + top_k), T], from stretches
        of `ratio` positions that it chose.

        chosen: of choose_cells among cells of compressed stretches, whose last positions are ends i32 [E]. Of the cells
        that the mask shows, at positions cell_pos i32 [n], those of chosen stretches, and those behind the last whole
        stretch of the positions up to the token's own, pos i32 [T].
        """
        if ratio < 1 or chosen.shape[1] != pos.shape[0] or mask[0].shape[:2] != (cell_pos.shape[0], pos.shape[0]):
            raise ValueError(f"stretches of {ratio}: choice {chosen.shape}, mask {mask[0].shape}, pos {pos.shape}")
        dst = self.new(ratio * chosen.shape[0], chosen.shape[1], type_id=I32)
        return self._emit("stretch_cells", dst, [chosen, ends, *mask, cell_pos, pos], ip=[ratio])

    def choose_blocks(
        self,
        q: Value,
        keys: Value,
        mask: tuple[Value, Value],
        cell_pos: Value,
        pos: Value,
        *,
        top_k: int,
        size: int,
        local: int,
    ) -> Value:
        """The cells that each token and head attends to as those of choose_cells, i32 [1 + top_k * size, T, H], in
        blocks of `size` positions.

        The top_k blocks with the largest q[:, h, t] . keys[:, s] of one of their visible cells s, the first ones where
        these are equal; the `local` last blocks up to the token's own are among them, and all where it sees no more.
        q f32 [n, H, T], keys [n, 1, n_kv] of any cache type, cell_pos i32 [n] and pos i32 [T].
        """
        n, heads, n_tokens = q.shape[:3]
        shapes = keys.shape[:2], mask[0].shape[:2], pos.shape[0]
        if shapes != ((n, 1), (cell_pos.shape[0], n_tokens), n_tokens) or not 0 <= local <= top_k or top_k * size < 1:
            raise ValueError(
                f"choice of {top_k} blocks of {size}, {local} local ones, by q {q.shape}, keys {keys.shape}"
            )
        dst = self.new(1 + top_k * size, n_tokens, heads, type_id=I32)
        return self._emit("choose_blocks", dst, [q, keys, *mask, cell_pos, pos], ip=[size, local])

    def compress_cells(
        self,
        values: Value,
        gates: Value,
        bias: Value,
        cell_pos: Value,
        cell_seq: Value,
        pos: Value,
        seq: Value,
        ends: Value,
        size: int,
        ratio: int,
    ) -> Value:
        """Entries f32 [size, E], each the mean of values of a stretch of positions, weighted by softmax(gate + bias)
        per element.

        values and gates f32 [w, 1, cells], w = size or 2 * size; bias f32 [w, ratio]; cell_pos i32 and cell_seq masks
        i64 [cells]; pos and seq i32 [T]; ends i32 [E]: the token behind each stretch of `ratio` positions, or -1. With
        2 * size the second halves of the stretch's cells count and the first halves of those of the stretch before.
        Cells that are not there are left out; an entry without cells is 0.
        """
        w, n_cells = values.shape[0], cell_pos.shape[0]
        shapes = values.shape[:3], gates.shape[:3], bias.shape[:2]
        if w not in (size, 2 * size) or shapes != ((w, 1, n_cells), (w, 1, n_cells), (w, ratio)):
            raise ValueError(f"entries of {size} and {ratio} positions from values, gates and bias {shapes}")
        if cell_seq.type_id != I64 or cell_seq.shape[0] != n_cells or pos.shape != seq.shape:
            raise ValueError(f"cells {cell_pos.shape} and {cell_seq.shape}, positions {pos.shape} of {seq.shape}")
        src = [values, gates, bias, cell_pos, cell_seq, pos, seq, ends]
        return self._emit("compress_cells", self.new(size, ends.shape[0]), src)
