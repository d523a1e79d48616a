"""What files of models that read pictures say about rows of these: sections of the rotation, features behind layers."""

from __future__ import annotations

from ikpy.errors import FileFormatError
from ikpy.graph.builder import RopeSections
from ikpy.models.base import Architecture
from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys


class ReadsPictures(Architecture):
    """Reads these keys beside those of the architecture that it is mixed into. For text all positions are
    equal, and the rotation is the plain one.
    """

    reads_grids = True
    # Sections take turns pair by pair instead of lying one behind the other.
    interleaves_sections = False

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        lengths = keys.optional_integers("rope.dimension_sections", 4)
        if lengths:
            if min(lengths) < 0 or not 0 < sum(lengths) <= hp.n_rot // 2:
                raise FileFormatError(
                    f"{keys.gguf.path}: {keys.arch}.rope.dimension_sections {lengths} are no parts of the "
                    f"{hp.n_rot // 2} pairs that are rotated"
                )
            time, height, width, fourth = lengths
            self.rope_sections = RopeSections((time, height, width, fourth), self.interleaves_sections)
        n_deep = keys.u32("n_deepstack_layers", 0)
        if n_deep >= hp.n_layer:
            raise FileFormatError(
                f"{keys.gguf.path}: pictures add features behind {n_deep} layers, all but the last of "
                f"{hp.n_layer} at most can be"
            )
        self.deep_parts = {il: il + 1 for il in range(n_deep)}
        return hp
