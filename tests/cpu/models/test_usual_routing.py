"""Files whose architecture means the sigmoid where they do not say how experts are scored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ikpy.engine.model import Model
from tests.cpu.models.reference_models import RandomModel
from tests.cpu.models.test_arch_afmoe import afmoe
from tests.cpu.models.test_arch_exaone import exaone_moe
from tests.cpu.models.test_arch_hy_v3 import hy_v3
from tests.cpu.models.test_arch_laguna import laguna
from tests.cpu.models.test_arch_step35 import step35
from tests.cpu.models.test_prediction_head import glm4moe

MAKERS: dict[str, Callable[[], RandomModel]] = {
    "afmoe": lambda: afmoe()[0],
    "exaone-moe": lambda: exaone_moe()[0],
    "glm4moe": lambda: glm4moe(own_matrices=False),
    "hy_v3": lambda: hy_v3()[0],
    "laguna": lambda: laguna()[0],
    "step35": lambda: step35()[0],
}


@pytest.mark.parametrize(("value", "gating"), [(None, "sigmoid"), (0, "sigmoid"), (1, "softmax"), (2, "sigmoid")])
@pytest.mark.parametrize("arch", MAKERS)
def test_gating_of_files_that_do_not_say_it(arch: str, value: int | None, gating: str, tmp_path: Path) -> None:
    """As llama.cpp has it; of exaone-moe, which cannot do without the key there, as the model is defined."""
    model = MAKERS[arch]()
    del model.keys["expert_gating_func"]
    if value is not None:
        model.keys["expert_gating_func"] = value
    assert Model.load(model.write(tmp_path / "model.gguf")).hparams.routing.gating == gating
