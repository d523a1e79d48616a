"""Rules and recipe files of `ikpy quantize`."""

from __future__ import annotations

import os

import pytest

from ikpy.cli.quantize import run
from ikpy.gguf.reader import GGUFFile
from tests.cpu.quantize.quantize_models import small_tensors, types_of, write_model


@pytest.fixture
def tensors():
    return small_tensors()


def test_recipe_file_and_late_options(tmp_path, tensors, capfd):
    write_model(tmp_path / "in.gguf", tensors)
    (tmp_path / "recipe.txt").write_text("# experts\nffn_.*_exps=iq3_k_r4\nffn_up=Q8_0  # dense\nabsent=q4_0\n")
    recipe = str(tmp_path / "recipe.txt")
    assert run([str(tmp_path / "in.gguf"), str(tmp_path / "out.gguf"), "Q4_K_S", "--custom-q", recipe]) == 0
    err = capfd.readouterr().err
    assert "custom rule absent=q4_0 has no effect: it matches no tensor that is converted" in err
    types = types_of(tmp_path / "out.gguf")
    assert types["blk.1.ffn_up_exps.weight"] == "iq3_k_r4"
    assert types["blk.0.ffn_up.weight"] == "q8_0"


def test_types_of_tensors_one_by_one(tmp_path, tensors, capfd):
    write_model(tmp_path / "in.gguf", tensors)
    (tmp_path / "types.txt").write_text("ffn_.*_exps=iq3_k_r4 ffn_up=Q8_0\n")
    options = ["--tensor-type", r"\.\d{1,2}\.attn_q=q6_k", "--tensor-type-file", str(tmp_path / "types.txt")]
    assert run([*options, str(tmp_path / "in.gguf"), str(tmp_path / "out.gguf"), "Q4_K_S"]) == 0
    types = types_of(tmp_path / "out.gguf")
    assert types["blk.1.ffn_up_exps.weight"] == "iq3_k_r4"
    assert types["blk.0.ffn_up.weight"] == "q8_0"
    assert "Adding custom rule \\.\\d{1,2}\\.attn_q -> q6_K" in capfd.readouterr().out


@pytest.mark.parametrize("option", ["--custom-q", "--tensor-type-file"])
def test_files_of_rules_are_not_overwritten(tmp_path, tensors, monkeypatch, capfd, option):
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "in.gguf", tensors)
    (tmp_path / "rules").write_text("ffn_up=q8_0\n")
    (tmp_path / "link").symlink_to("rules")
    for arguments in (["--save-recipe", "link", "in.gguf", "out.gguf"], ["in.gguf", "rules"]):
        assert run([option, "rules", *arguments, "Q4_K_S"]) == 1
        assert f"{arguments[1]} is a file of rules; give another output name" in capfd.readouterr().err
    assert (tmp_path / "rules").read_text() == "ffn_up=q8_0\n"
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize("value", ["", " , "])
def test_empty_rules_are_refused(tmp_path, tensors, capfd, value):
    """What a misspelled variable of the shell gives, as text or from a file."""
    write_model(tmp_path / "in.gguf", tensors)
    path = tmp_path / "rules"
    path.write_text(value.replace(",", "\n"))
    for option, given, message in (
        ("--custom-q", value, f"Invalid custom quantization input '{value.strip()}': it is empty"),
        ("--custom-q", str(path), f"{path}: Invalid custom quantization input '': it is empty"),
        ("--tensor-type-file", str(path), f"--tensor-type-file {path}: the file is empty"),
    ):
        assert run([option, given, str(tmp_path / "in.gguf"), str(tmp_path / "out.gguf"), "Q4_K_S"]) == 1
        assert message in capfd.readouterr().err
    assert not (tmp_path / "out.gguf").exists()


def test_rules_are_announced_before_the_work(tmp_path, tensors, capfd):
    """Count and size of every rule, partly and wholly shadowed ones, and the predicted size."""
    write_model(tmp_path / "in.gguf", tensors)
    rules = "ffn_up_exps=q8_0,ffn_up=q4_0,blk.0=q5_0,token_embd=q6_0"
    options = ["--custom-q", rules, "--token-embedding-type", "q8_0"]
    assert run([*options, str(tmp_path / "in.gguf"), str(tmp_path / "out.gguf"), "Q4_K_S"]) == 0
    err = capfd.readouterr().err
    announced = err[: err.index("[   1/   3]")]
    assert "custom rule ffn_up_exps -> q8_0: 1 tensors, 0.02 MiB\n" in announced
    assert (
        "custom rule ffn_up -> q4_0: 1 tensors, 0.01 MiB; 1 more match earlier rules (first ffn_up_exps=q8_0)\n"
        in announced
    )
    assert "custom rule blk.0=q5_0 has no effect: its 1 tensors match earlier rules (first ffn_up=q4_0)\n" in announced
    assert "custom rule token_embd=q6_0 has no effect: options for single tensors decide its 1 tensors\n" in announced
    size = (tmp_path / "out.gguf").stat().st_size
    assert f"needs {size / 2**20:.3f} MiB, " in announced
    with GGUFFile.open(tmp_path / "out.gguf") as file:
        nbytes = sum(info.nbytes for info in file.tensors.values())
    n_weights = sum(values.size for values in tensors.values())
    assert f"output size = {nbytes / 2**20:.3f} MiB (0.000 GiB), {nbytes * 8 / n_weights:.3f} BPW\n" in announced


@pytest.mark.parametrize(
    ("options", "what"), [(["--pure"], "--pure"), (["--repack"], "--repack"), ([], "type F16"), ([], "type COPY")]
)
def test_rules_that_cannot_be_used_are_reported(tmp_path, tensors, capfd, options, what):
    write_model(tmp_path / "in.gguf", tensors)
    assert run([str(tmp_path / "in.gguf"), str(tmp_path / "q.gguf"), "--pure", "Q8_0"]) == 0
    source = "q.gguf" if what == "--repack" else "in.gguf"
    ftype = what.split()[1] if what.startswith("type") else "Q8_0"
    rules = ["--custom-q", "ffn=q4_0", *options]
    assert run([*rules, str(tmp_path / source), str(tmp_path / "out.gguf"), ftype]) == 0
    assert f"WARNING: custom rules have no effect with {what}\n" in capfd.readouterr().err


def test_a_comment_of_joined_lines_hides_no_rules(tmp_path, tensors, capfd):
    """Lines joined by commas with their comments: everything behind the first one would be lost."""
    write_model(tmp_path / "in.gguf", tensors)
    line = [str(tmp_path / "in.gguf"), str(tmp_path / "out.gguf"), "Q4_K_S"]
    for joined in ("# attention,attn=q8_0,ffn=q6_K", "attn=q8_0, # ffn,ffn=q6_K"):
        assert run(["--custom-q", joined, *line]) == 1
        assert "the rules behind this comment are on its line" in capfd.readouterr().err
        assert not (tmp_path / "out.gguf").exists()
    assert run(["--custom-q", "# attention, not all=\nattn=q8_0 # ffn, too\n# x=q4_0,ffn=q6_K\n", *line]) == 0
    assert "Adding custom rule attn -> q8_0\nmain" in capfd.readouterr().out.replace("\n\n", "\n")


def test_rules_may_name_posix_classes(tmp_path, tensors, capfd):
    write_model(tmp_path / "in.gguf", tensors)
    rule = r"blk\.[[:digit:]]+\.ffn_up=q8_0"
    assert run(["--custom-q", rule, str(tmp_path / "in.gguf"), str(tmp_path / "out.gguf"), "Q4_K_S"]) == 0
    assert types_of(tmp_path / "out.gguf")["blk.0.ffn_up.weight"] == "q8_0"
    assert "Warning" not in capfd.readouterr().err


YAML_RECIPE = r"""
# comments are free
token_embedding_type: q6_0
output-tensor-type: q8_0
rules:
  - 'ffn_up_exps': IQ3_K
  - 'blk\.\d{1,2}\.ffn_up\.weight': q5_K
  - "absent=q4_0  # text rules work as well"
"""


def test_yaml_recipe(tmp_path, tensors, capfd):
    write_model(tmp_path / "in.gguf", tensors)
    (tmp_path / "recipe.yaml").write_text(YAML_RECIPE)
    arguments = ["--custom-q", str(tmp_path / "recipe.yaml"), str(tmp_path / "in.gguf"), str(tmp_path / "out.gguf")]
    assert run([*arguments, "Q4_K_S"]) == 0
    out, err = capfd.readouterr()
    assert "Adding custom rule blk\\.\\d{1,2}\\.ffn_up\\.weight -> q5_K\n" in out
    assert "custom rule absent=q4_0 has no effect" in err
    expected = {"token_embd.weight": "q6_0", "blk.0.ffn_up.weight": "q5_K", "blk.1.ffn_up_exps.weight": "iq3_k"}
    assert types_of(tmp_path / "out.gguf") == expected
    assert run(["--token-embedding-type", "q8_0", *arguments, "Q4_K_S"]) == 0
    assert types_of(tmp_path / "out.gguf")["token_embd.weight"] == "q8_0", "the command line wins"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("rules: [", "recipe.yaml: line 1: not valid YAML"),
        ("- a\n- b\n", "a YAML recipe is a mapping with the key 'rules'"),
        ("rules:\n  ffn: q9_9\n", "Invalid quantization type 'q9_9' in custom quantization input ffn=q9_9"),
        ("rules:\n  'ffn(': q4_0\n", "regular expression of custom rule ffn(=q4_0 is invalid"),
        ("rules:\n  - 3\n", "rule 3 is no 'regex: type'"),
        ("rules:\n  ffn: 4\n", "rule 'ffn': 4 is no 'regex: type'"),
        ("rulez: 3\n", "unknown key 'rulez'; a recipe may have 'rules' and output-tensor-type"),
        ("token_embedding_type: q9\n", "recipe.yaml: token-embedding-type: unknown tensor type 'q9'"),
        ("token_embedding_type: [q8_0]\n", "needs a single value"),
    ],
)
def test_wrong_yaml_recipes(tmp_path, tensors, capfd, content, message):
    write_model(tmp_path / "in.gguf", tensors)
    (tmp_path / "recipe.yaml").write_text(content)
    arguments = ["--custom-q", str(tmp_path / "recipe.yaml"), str(tmp_path / "in.gguf"), str(tmp_path / "out.gguf")]
    assert run([*arguments, "Q4_K_S"]) == 1
    err = capfd.readouterr().err
    assert message in err
    assert err.count("\n") == 1, "one line"


def test_rules_from_a_pipe_and_with_blanks(tmp_path, tensors, capfd):
    """As `--custom-q <(grep -v '^#' recipe.txt)` in a shell."""
    write_model(tmp_path / "in.gguf", tensors)
    read, write = os.pipe()
    os.write(write, b"blk.0.ffn_up = q6_K\n# experts\n ffn_up_exps = iq4_nl \n")
    os.close(write)
    assert run(["--custom-q", f"/dev/fd/{read}", str(tmp_path / "in.gguf"), str(tmp_path / "out.gguf"), "Q4_0"]) == 0
    os.close(read)
    out = capfd.readouterr().out
    assert "Adding custom rule blk.0.ffn_up -> q6_K\nAdding custom rule ffn_up_exps -> iq4_nl\n" in out
    types = types_of(tmp_path / "out.gguf")
    assert types["blk.0.ffn_up.weight"] == "q6_K" and types["blk.1.ffn_up_exps.weight"] == "iq4_nl"


@pytest.mark.parametrize("option", ["--custom-q", "--tensor-type-file"])
def test_rules_behind_a_byte_order_mark(tmp_path, tensors, capfd, option):
    """Editors of Windows put it first in a file; it belongs to no rule."""
    write_model(tmp_path / "in.gguf", tensors)
    (tmp_path / "rules.txt").write_text("ffn_up\\.weight=q6_K\n", encoding="utf-8-sig")
    arguments = [option, str(tmp_path / "rules.txt"), str(tmp_path / "in.gguf"), str(tmp_path / "out.gguf"), "Q4_0"]
    assert run(arguments) == 0
    assert types_of(tmp_path / "out.gguf")["blk.0.ffn_up.weight"] == "q6_K"


def test_long_text_without_a_rule(capfd):
    assert run(["--custom-q", "x" * 5000, "in.gguf", "out.gguf", "Q4_0"]) == 1
    assert "expected REGEX=TYPE or the name of a file of rules" in capfd.readouterr().err
