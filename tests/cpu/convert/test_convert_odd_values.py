"""Values of config.json of another type than their keys have: one line that names the key, the value and the type."""

from __future__ import annotations

import copy
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from ikpy.convert import Conversion
from ikpy.convert.odd_values import kind_of, odd_value, shown
from ikpy.errors import FileFormatError, IkpyError
from tests.cpu.convert import checkpoints as made
from tests.cpu.convert import seeded_checkpoints as seeded
from tests.cpu.convert.seeded_kinds import KINDS

ODD = ("word", [], [1, 2], {"a": 1}, True, 1.5, math.nan, math.inf, -1, 0, 10**30, [None])
N_CONFIGS = 3
"""Of each seeded checkpoint."""


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        ("qwen3", {"layer_types": 7}, r"'layer_types' is 7, not a list \(TypeError"),
        ("qwen3", {"rope_parameters": "yarn"}, r"'rope_parameters' is \"yarn\", not an object \("),
        ("qwen3", {"rope_parameters": [1]}, r"'rope_parameters' is \[1\], not an object \("),
        ("qwen3", {"tie_word_embeddings": {}}, r"'tie_word_embeddings' is {}, not true or false \("),
        ("qwen3", {"hidden_size": "64" * 500}, r"'hidden_size' is \"6{1}(46)*.*\.\.\., not an integer$"),
        ("qwen3", {"num_attention_heads": 0}, r"'num_attention_heads' is 0, which cannot be 0 \("),
        ("qwen3", {"intermediate_size": -1}, r"'intermediate_size' is -1, below 0 \(qwen3.feed_forward_length\)$"),
        ("qwen3", {"rms_norm_eps": [1]}, r"'rms_norm_eps' is \[1\], not a number$"),
        ("deepseek-v3", {"moe_intermediate_size": True}, r"'moe_intermediate_size' is true, not an integer$"),
        (
            "deepseek-v3",
            {"n_group": -(10**30)},
            r"'n_group' is -10+, not a number that is possible \(deepseek2.expert_group_count\)$",
        ),
    ],
)
def test_the_value_is_named(kind: str, values: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = made.copy(kind, tmp_path)
    made.amend(folder, **values)
    with pytest.raises(FileFormatError, match=message) as error:
        Conversion(folder).plan()
    assert len(str(error.value)) < 400 and "\n" not in str(error.value)


def test_other_causes_are_not_hidden() -> None:
    """A configuration that looks right is not blamed for an error."""
    assert odd_value(made.read_json(made.CHECKPOINTS / "qwen3" / "config.json"), ZeroDivisionError()) is None


def test_values_that_are_possible_are_not_blamed() -> None:
    """-1 for none, groups of quantizations, gaps in lists."""
    assert odd_value({"sliding_window": -1, "quantization_config": {"group_size": -1}}) is None
    assert (
        odd_value({"intermediate_size": [1, None]})
        == "'intermediate_size' is [1, null], with nothing in it at some places"
    )


def test_kinds_of_the_checkpoints() -> None:
    """No value of a checkpoint that is converted looks odd."""
    for tiny in KINDS:
        assert odd_value(tiny.config) is None, tiny.name
    for folder in sorted(made.CHECKPOINTS.iterdir()):
        assert odd_value(made.read_json(folder / "config.json")) is None, folder.name


def test_types_by_name() -> None:
    wanted = {
        "hidden_size": "an integer",
        "rope_theta": "a number",
        "layer_types": "a list",
        "use_cache": "true or false",
    }
    found = {name: kind.words for name in wanted if (kind := kind_of(name))}
    assert found == wanted and kind_of("whatever") is None
    assert shown([0] * 99).endswith("...") and len(shown([0] * 99)) < 50


def _paths(values: dict[str, Any], at: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    inner = [path for key, value in values.items() if isinstance(value, dict) for path in _paths(value, (*at, key))]
    return [*((*at, key) for key in values), *inner]


@pytest.mark.parametrize("tiny", KINDS, ids=lambda tiny: tiny.name)
def test_no_configuration_ends_in_a_traceback(tiny: seeded.Tiny, tmp_path: Path) -> None:
    folder = seeded.write(tiny, tmp_path / "model")
    config, rng = made.read_json(folder / "config.json"), random.Random(tiny.name)
    for _ in range(N_CONFIGS):
        changed, path, value = copy.deepcopy(config), rng.choice(_paths(config)), rng.choice(ODD)
        at = changed
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value
        (folder / "config.json").write_text(json.dumps(changed))
        try:
            Conversion(folder).plan()
        except IkpyError as error:
            assert "\n" not in str(error) and len(str(error)) < 1000, (path, value)
