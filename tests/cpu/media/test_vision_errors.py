"""Projector files that are damaged, odd or another model's: one line each."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from random import Random

import numpy as np
import pytest

import ikpy
from ikpy.errors import FileFormatError, IkpyError, ResourceError, UnsupportedError, UsageError
from ikpy.gguf.writer import GGUFWriter
from ikpy.machine import memory as machine_memory
from ikpy.quants import registry
from ikpy.tools.media_tokens import ProjectorOptions, projector_fingerprint
from ikpy.vision import projector
from ikpy.vision.projector import open_projector
from tests.cpu.gguf.damage import damage_bytes, damage_gguf
from tests.cpu.media.tile_towers import TOWERS, picture
from tests.cpu.media.tile_weights import TileTower, Weights
from tests.cpu.media.tower_kinds import STEP3VL
from tests.cpu.media.tower_kinds import TOWERS as NATIVE
from tests.cpu.media.vision_towers import Tower

GEMMA3 = TOWERS["gemma3"]
ALL: dict[str, TileTower | Tower] = {**TOWERS, **NATIVE, "step3vl": STEP3VL}


def attempt(path: Path, tower: TileTower, **options: int) -> None:
    """Opens a file and encodes a picture."""
    open_projector(str(path), n_embd=tower.text, n_threads=1, log=print, **options).encode(picture(40, 61))


def refused(folder: Path, tower: TileTower, weights: Weights | None, error: type[IkpyError], message: str) -> None:
    """Writes a file that gets an error of one line."""
    path = tower.write(folder / "mmproj.gguf", weights)
    with pytest.raises(error, match=message) as caught:
        attempt(path, tower)
    assert "\n" not in str(caught.value)


def changed(tower: TileTower, **further: object) -> TileTower:
    """The tower with other keys."""
    return dataclasses.replace(tower, further={**tower.further, **further})


def test_files_of_other_models(tmp_path: Path) -> None:
    path = GEMMA3.write(tmp_path / "mmproj.gguf")
    with pytest.raises(UsageError, match="makes rows of 32 elements, the text model wants 48: it is another model's"):
        open_projector(str(path), n_embd=48, n_threads=1, log=print)
    with pytest.raises(UsageError, match="is no projector file: its architecture is 'deepseek2', not 'clip'"):
        open_projector(str(ikpy.default_model_path()), n_embd=32, n_threads=1, log=print)
    with pytest.raises(UsageError, match="cannot open model: does not exist"):
        open_projector(str(tmp_path / "none.gguf"), n_embd=32, n_threads=1, log=print)
    with pytest.raises(UsageError, match="at least 9 and at most 8 tokens of a picture"):
        open_projector(str(path), n_embd=32, n_threads=1, log=print, min_tokens=9, max_tokens=8)


def test_kinds_that_are_not_there(tmp_path: Path) -> None:
    refused(
        tmp_path, dataclasses.replace(GEMMA3, kind="laser"), None, UnsupportedError, "unknown projector type 'laser'"
    )
    audio = dataclasses.replace(GEMMA3, outer={"clip.has_vision_encoder": False, "clip.has_audio_encoder": True})
    refused(tmp_path, audio, None, UnsupportedError, "holds no encoder of pictures")
    several = dataclasses.replace(GEMMA3, outer={"clip.has_vision_encoder": [True, True]})
    refused(tmp_path, several, None, UnsupportedError, "holds no encoder of pictures")
    no_kind = dataclasses.replace(GEMMA3, kind="")
    refused(tmp_path, no_kind, None, FileFormatError, "key clip.projector_type not found")
    version = dataclasses.replace(TOWERS["minicpmv"], outer={"clip.minicpmv_version": 9})
    refused(tmp_path, version, None, UnsupportedError, "clip.minicpmv_version 9 is not known")
    for value in ("3", 3.0, float("nan"), True, [3.0, 4.0]):
        version = dataclasses.replace(TOWERS["minicpmv"], outer={"clip.minicpmv_version": value})
        refused(tmp_path, version, None, FileFormatError, "key clip.minicpmv_version must hold an integer")


def test_more_patches_than_pictures_may_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of encoders that make every picture as large as the file says."""
    monkeypatch.setattr(projector, "MAX_PATCHES", 63)
    refused(tmp_path, GEMMA3, None, FileFormatError, "pictures of 8 x 8 patches .* at most 63 are possible")


@pytest.mark.parametrize(
    ("name", "further", "message"),
    [
        ("gemma3", {"patch_size": 0}, "clip.vision.patch_size is 0, not 1 to 8192"),
        ("gemma3", {"image_std": [0.5, 0.0, 0.5]}, "clip.vision.image_std is 0"),
        ("gemma3", {"image_mean": [0.5]}, "key clip.vision.image_mean must hold 3 floats"),
        ("gemma3", {"attention.head_count": 5}, "embedding_length 48 is no multiple of attention.head_count 5"),
        ("gemma3", {"projector.scale_factor": 3}, "sides of 8 patches are no multiple of .*scale_factor 3"),
        ("gemma3", {"attention.layer_norm_epsilon": float("nan")}, "layer_norm_epsilon is nan"),
        ("gemma3", {"attention.layer_norm_epsilon": -1.0}, "attention.layer_norm_epsilon -1.0 is below 0"),
        ("llava_features", {"feature_layer": [4]}, "feature_layer names layers outside 0 to 3"),
        ("llava_next", {"image_grid_pinpoints": [28, 57]}, "holds no sizes of tiles of 28"),
        ("internvl", {"preproc_min_tiles": 13}, "preproc_min_tiles is larger than preproc_max_tiles"),
        ("idefics3", {"preproc_image_size": 0}, "preproc_image_size is 0, not 1 to 8192"),
        ("lfm2", {"image_resize_algo": "nearest"}, "clip.vision.image_resize_algo 'nearest' is not known"),
    ],
)
def test_keys_that_make_no_sense(name: str, further: dict[str, object], message: str, tmp_path: Path) -> None:
    refused(tmp_path, changed(TOWERS[name], **further), None, IkpyError, message)


@pytest.mark.parametrize("name", ["gemma4", "lfm2", "qwen2vl"])
def test_limits_that_no_picture_keeps(name: str, tmp_path: Path) -> None:
    """One end is the user's, the other the usual one of the family."""
    tower = ALL[name]
    path = tower.write(tmp_path / "mmproj.gguf", tower.weights())
    for ends in ({"min_tokens": 5000}, {"max_tokens": 1}):
        with pytest.raises(UsageError, match=r"pictures of at least .* tokens: change --image-min-tokens"):
            open_projector(str(path), n_embd=tower.text, n_threads=1, log=print, **ends)


@pytest.mark.parametrize("name", TOWERS)
def test_tensors_that_are_missing_or_of_other_shapes(name: str, tmp_path: Path) -> None:
    """Files without a tensor are refused or, where it may be left out, read; no shape but the right one is taken."""
    tower, refusals = TOWERS[name], 0
    weights = tower.weights()
    for tensor, w in weights.items():
        if ".blk.1." in tensor or ".blk.2." in tensor or tensor == "resampler.pos_embed_k":
            continue
        free = tensor == "resampler.query" or (name, tensor) == ("nemotron", "v.class_embd")
        path = tower.write(tmp_path / "mmproj.gguf", {k: v for k, v in weights.items() if k != tensor})
        try:
            attempt(path, tower)
        except IkpyError as error:
            assert "\n" not in str(error)
            refusals += 1
        if not free:
            refused(tmp_path, tower, {**weights, tensor: np.concatenate([w, w[:1]])}, IkpyError, ".")
    assert refusals > 5


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["gemma3", "gemma4"])
@pytest.mark.parametrize("further", [{"image_std": [1e-40] * 3}, {"image_mean": [-3e38] * 3}])
def test_colours_that_are_infinite(name: str, further: dict[str, object], tmp_path: Path) -> None:
    """One line and no warning beside it."""
    refused(tmp_path, changed(TOWERS[name], **further), None, FileFormatError, "the rows of a picture are no numbers")


@pytest.mark.parametrize("name", ALL)
def test_dimensions_of_1_are_stored_or_not(name: str, tmp_path: Path) -> None:
    """Tensors of four dimensions, or of as few as there are, are the same."""
    tower = ALL[name]
    weights, found = tower.weights(), []
    filled = {n: w.reshape((1,) * (4 - w.ndim) + w.shape) for n, w in weights.items()}
    flat = {n: w.reshape(w.shape[next((i for i, k in enumerate(w.shape) if k > 1), 0) :]) for n, w in weights.items()}
    for each in (weights, filled, flat):
        path = tower.write(tmp_path / "mmproj.gguf", each)
        opened = open_projector(str(path), n_embd=tower.text, n_threads=1, log=print)
        found.append([piece for piece in opened.encode(picture(40, 61)) if not isinstance(piece, str)])
    assert all(
        np.array_equal(a.values, b.values) for others in found[1:] for a, b in zip(found[0], others, strict=True)
    )


@pytest.mark.parametrize("name", ALL)
def test_tensors_of_one_dimension(name: str, tmp_path: Path) -> None:
    """A picture or one line."""
    tower = ALL[name]
    weights = tower.weights()
    for tensor, w in weights.items():
        if ".blk.1." in tensor or ".blk.2." in tensor:
            continue
        for changed in (w.reshape(-1), w.reshape(-1)[:1]):
            path = tower.write(tmp_path / "mmproj.gguf", {**weights, tensor: changed})
            try:
                open_projector(str(path), n_embd=tower.text, n_threads=1, log=print).encode(picture(40, 61))
            except IkpyError as error:
                assert "\n" not in str(error)


def test_values_of_one_head_alone(tmp_path: Path) -> None:
    tower = TOWERS["gemma4"]
    weights = tower.weights()
    weights["v.blk.1.attn_v.weight"] = weights["v.blk.1.attn_v.weight"][:13]
    refused(
        tmp_path, tower, weights, FileFormatError, "queries, keys and values of 48, 48 and 13 elements, heads have 12"
    )


def test_pictures_that_are_too_narrow(tmp_path: Path) -> None:
    opened = open_projector(str(TOWERS["gemma4"].write(tmp_path / "mmproj.gguf")), n_embd=32, n_threads=1, log=print)
    with pytest.raises(UsageError, match="a picture of 4000 x 3 pixels is too narrow for the model"):
        opened.encode(picture(3, 4000))


def test_pictures_of_too_many_patches(tmp_path: Path) -> None:
    """A damaged size, for which neither time nor memory would be enough."""
    refused(
        tmp_path,
        changed(TOWERS["minicpmv"], image_size=8191),
        None,
        ResourceError,
        "a picture of 1170 x 1170 patches; at most 262144 are possible",
    )


def test_pictures_that_memory_is_too_small_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And pictures of other sizes are encoded as before."""
    opened = open_projector(str(TOWERS["gemma4"].write(tmp_path / "mmproj.gguf")), n_embd=32, n_threads=1, log=print)
    small, large = picture(40, 61), picture(400, 610)
    before = opened.rows(opened.tiles(small)[0])  # type: ignore[arg-type]
    monkeypatch.setattr(machine_memory, "machine_memory", lambda swap=True: 1 << 16)
    with pytest.raises(ResourceError, match=r"not enough memory \(a picture of .* patches takes .*: use a smaller one"):
        opened.encode(large)
    after = opened.rows(opened.tiles(small)[0])  # type: ignore[arg-type]
    assert np.array_equal(before.values, after.values)


@pytest.mark.parametrize("name", ["internvl", "gemma4", "minicpmv"])
def test_damaged_files(name: str, tmp_path: Path) -> None:
    """A picture or one line."""
    tower, random = TOWERS[name], Random(f"projector {name}")
    path = tower.write(tmp_path / "mmproj.gguf")
    good, seen = path.read_bytes(), 0
    for i in range(60):
        damage = damage_gguf if i % 2 else lambda random, data: damage_bytes(random, data, 0, 3000)
        path.write_bytes(damage(random, good))
        try:
            attempt(path, tower)
        except IkpyError as error:
            assert "\n" not in str(error)
            seen += 1
    assert seen > 10


def test_another_tensor_is_another_projector(tmp_path: Path) -> None:
    """Whichever it is, also of files with hundreds of them: rows in the caches of slot files are of one projector."""

    def written(name: str, changed: str = "") -> str:
        file = GGUFWriter(tmp_path / name)
        tensors = {f"v.blk.{i // 4}.t{i % 4}": np.full(4096, i, np.float32) for i in range(200)}
        for key in tensors:
            file.add_tensor(key, (4096,), registry.by_name("f32").id)
        with file:
            for key, values in tensors.items():
                file.write(key, (values + (key == changed)).view(np.uint8))
        return projector_fingerprint(str(tmp_path / name), ProjectorOptions(1))

    plain = written("plain.gguf")
    assert written("same.gguf") == plain
    for i in (3, *range(101, 200, 14)):
        assert written("other.gguf", f"v.blk.{i // 4}.t{i % 4}") != plain, i
