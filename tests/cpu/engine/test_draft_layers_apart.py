"""Files of prediction layers alone (`mtp-*.gguf`) beside a model that has none: drafts, errors, programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from ikpy.cli import main
from ikpy.engine.speculative import SpeculativeParams
from ikpy.errors import UsageError
from ikpy.gguf.reader import GGUFFile
from ikpy.llm import LLM
from ikpy.tools.speculation import DraftFiles
from tests.cpu.convert import prediction_checkpoints as predicting
from tests.cpu.convert.checkpoints import convert

TEXT = "The old man looked at the sea"
PARAMS = SpeculativeParams(types=("mtp",), n_max=3, p_min=0.0)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """GLM-4.5's kind and Qwen3-Next's as files with prediction layers, without, and of these alone."""
    found = {}
    for kind in predicting.KINDS_OF_LAYERS:
        if kind.name in ("glm4moe", "qwen3next"):
            folder = tmp_path_factory.mktemp(kind.name)
            made = predicting.make(kind, folder)
            for which in ("keep", "none", "only"):
                found[f"{kind.name} {which}"] = str(
                    convert(made.folder, folder / which, outtype="f32", prediction=which).path
                )
    return found


@pytest.mark.parametrize("name", ["glm4moe", "qwen3next"])
def test_drafts_are_those_of_the_whole_file(name: str, files: dict[str, str]) -> None:
    plain = LLM(files[f"{name} none"], n_ctx=256, n_threads=1)
    expected = plain.generate(TEXT, 24, temperature=0.0)
    numbers = []
    for model, draft in (("keep", None), ("none", files[f"{name} only"])):
        beside = None if draft is None else DraftFiles(draft)
        llm = LLM(files[f"{name} {model}"], speculative=PARAMS, draft_files=beside, n_ctx=256, n_threads=1)
        assert llm.generate(TEXT, 24, temperature=0.0) == expected
        assert llm.speculator is not None
        assert [drafter.name for drafter in llm.speculator.drafters] == ["mtp"]
        numbers.append((llm.speculator.n_drafted, llm.speculator.n_accepted))
    assert numbers[0] == numbers[1] and numbers[0][0] > 20


def test_what_does_not_fit_is_refused(files: dict[str, str]) -> None:
    other = DraftFiles(files["qwen3next only"])
    with pytest.raises(
        UsageError, match="prediction layers of qwen3next with states of 64; the model is glm4moe with 64"
    ):
        LLM(files["glm4moe none"], speculative=PARAMS, draft_files=other)
    for types in ((), ("draft",), ("mtp", "draft")):
        with pytest.raises(UsageError, match="has prediction layers alone: --spec-type mtp drafts from it"):
            LLM(
                files["glm4moe none"],
                speculative=SpeculativeParams(types=types),
                draft_files=DraftFiles(files["glm4moe only"]),
            )
    with pytest.raises(UsageError, match="give it with -md and --spec-type mtp"):
        LLM(files["glm4moe only"])


@pytest.mark.parametrize("command", ["cli", "quantize", "imatrix"])
def test_programs(command: str, files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = files["glm4moe only"]
    common = ["-p", TEXT, "-n", "8", "--temp", "0", "-t", "1", "-c", "256", "-no-cnv"]
    if command == "cli":
        assert main(["cli", "-m", files["glm4moe none"], "-md", own, "--spec-type", "mtp", *common]) == 0
        assert "speculative decoding: mtp" in capsys.readouterr().err
        assert main(["cli", "-m", own, *common]) == 1
        assert "prediction layers alone" in capsys.readouterr().err
    elif command == "quantize":
        assert main(["quantize", own, str(tmp_path / "out.gguf"), "Q8_0"]) == 0
        small = GGUFFile.open(tmp_path / "out.gguf")
        assert small.metadata["glm4moe.nextn_predict_layers"] == 1
        assert main(["cli", "-m", files["glm4moe none"], "-md", str(small.path), "-mtp", *common]) == 0
    else:
        (tmp_path / "text.txt").write_text(TEXT * 40)
        assert main(["imatrix", "-m", own, "-f", str(tmp_path / "text.txt"), "-o", str(tmp_path / "i.dat")]) == 1
        assert "prediction layers alone" in capsys.readouterr().err
