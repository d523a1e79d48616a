"""`ikpy convert` of HunyuanVL: the projector is that of the tests of its encoder; sections of the text part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.convert import Conversion
from ikpy.errors import FileFormatError, IkpyError
from ikpy.vision.projector import open_projector
from tests.cpu.convert import checkpoints as made
from tests.cpu.convert import seeded_checkpoints as tiny
from tests.cpu.convert.checkpoints import amend, change_tensors, convert, read_json
from tests.cpu.convert.hunyuan_vl_checkpoints import CHECKPOINTS, HEAD, ROPE, SECTIONS, name_of, write
from tests.cpu.convert.test_convert_projectors import converted, refused
from tests.cpu.media import hunyuan_tower as reference
from tests.cpu.media.hunyuan_tower import TOWER
from tests.cpu.models.definition_checks import hold

(TEXT,) = CHECKPOINTS


@pytest.mark.parametrize("kind", [0, 1])
def test_file_is_that_of_the_tests(kind: int, tmp_path: Path) -> None:
    """From published names and those of transformers."""
    file, weights = converted(write(tmp_path / "checkpoint", kind)), TOWER.weights()
    assert set(file.tensors) == set(weights)
    for name, values in weights.items():
        found = file.data(file.tensors[name]).view(np.float32).reshape(values.shape)
        np.testing.assert_array_equal(found, values, err_msg=name)
    for key, value in TOWER.keys.items():
        assert file.metadata[key] == pytest.approx(value), key


@pytest.mark.parametrize(("outtype", "bound"), [("f16", 5e-3), ("q8_0", 5e-2)])
def test_rows_of_other_types(outtype: str, bound: float, tmp_path: Path) -> None:
    picture = TOWER.picture(10, 14)
    file = converted(write(tmp_path / "checkpoint"), outtype)
    pieces = open_projector(file.path, n_embd=TOWER.text, n_threads=1, log=print).encode(picture)
    found = np.concatenate([piece.values for piece in pieces if not isinstance(piece, str)])
    hold(outtype, found, reference.rows(TOWER, TOWER.weights(), picture), bound)


@pytest.mark.parametrize(
    ("changes", "message", "error"),
    [
        ({"num_attention_heads": 7}, "7 heads in 60", FileFormatError),
        ({"hidden_act": "silu"}, "activation 'silu'", FileFormatError),
        ({"interpolate_mode": "bicubic"}, "interpolate_mode bicubic", FileFormatError),
        ({"cat_extra_token": 0}, "cat_extra_token 0", FileFormatError),
        ({"spatial_merge_size": 3}, "has shape", FileFormatError),
        ({"max_image_size": 60}, "has shape", FileFormatError),
        ({"max_image_size": 5}, "smaller than a patch", FileFormatError),
        ({"num_key_value_heads": 1}, "num_key_value_heads 1", FileFormatError),
    ],
)
def test_other_encoders(changes: dict[str, Any], message: str, error: type[IkpyError], tmp_path: Path) -> None:
    folder = write(tmp_path / "checkpoint")
    amend(folder, vision_config=read_json(folder / "config.json")["vision_config"] | changes)
    refused(folder, message, error=error)


@pytest.mark.parametrize("name", ["mm.image_end", "mm.2.weight", "v.blk.1.ffn_up.bias", "v.position_embd.weight"])
def test_missing_tensors(name: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "checkpoint")
    change_tensors(folder, lambda tensors: tensors.pop(name_of(name, 0)))
    refused(folder, "is missing; the checkpoint is incomplete")


def test_text_part_beside_an_encoder(tmp_path: Path) -> None:
    """Encoders are left out, under both names; the base is stretched once for all."""
    files = []
    for others in ((), ("vit.perceive.image_sep",), ("model.vision_tower.patch_merger.image_sep",)):
        folder = tiny.write(TEXT, tmp_path / str(len(files)) / "checkpoint")
        other = made.bf16(np.ones((4, 4), np.float32))
        change_tensors(folder, lambda t, others=others, other=other: t.update(dict.fromkeys(others, other)))  # type: ignore[misc]
        assert bool(others) == any("--mmproj writes the encoder" in note for note in Conversion(folder).notes)
        files.append(convert(folder, tmp_path / str(len(files)), outtype="f32"))
    for file in files:
        assert set(file.tensors) == set(files[0].tensors)
        assert file.metadata["general.architecture"] == "hunyuan_vl"
        assert file.metadata["hunyuan_vl.rope.dimension_sections"].tolist() == SECTIONS
        base = 10000.0 * 1000.0 ** (HEAD / (HEAD - 2))
        assert file.metadata["hunyuan_vl.rope.freq_base"] == pytest.approx(base)


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"type": "xdrope", "xdrope_section": [0.25, 0.25, 0.25, 0.25]}, SECTIONS),
        ({"rope_type": "dynamic", "mrope_section": [4, 5, 4, 3]}, [4, 5, 4, 3]),
    ],
)
def test_spellings_of_sections(rope: dict[str, Any], expected: list[int], tmp_path: Path) -> None:
    folder = tiny.write(TEXT, tmp_path / "checkpoint")
    amend(folder, rope_scaling={**ROPE, **rope})
    file = convert(folder, tmp_path, outtype="f32")
    assert file.metadata["hunyuan_vl.rope.dimension_sections"].tolist() == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {**ROPE, "type": "xdrope"}}, "mrope_section None"),
        ({"rope_scaling": {**ROPE, "type": "xdrope", "xdrope_section": [4, 4, 8]}}, r"mrope_section \[4, 4, 8\]"),
        ({"rope_scaling": {**ROPE, "type": "xdrope", "xdrope_section": [4, 4, 4, 5]}}, "of 16 pairs"),
        ({"rope_scaling": {**ROPE, "type": "xdrope", "xdrope_section": [4, 4, 4, "4"]}}, "mrope_section"),
        ({"rope_scaling": {"type": "xdrope", "xdrope_section": SECTIONS}}, "RoPE scaling 'dynamic'"),
        ({"num_experts": 8}, "experts"),
        ({"use_qk_norm": False}, "use_qk_norm false"),
    ],
)
def test_other_text_parts(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = tiny.write(TEXT, tmp_path / "checkpoint")
    amend(folder, **changes)
    with pytest.raises(IkpyError, match=message) as caught:
        Conversion(folder)
    assert "\n" not in str(caught.value)
