"""`ikpy quantize --target-size/--target-bpw`: limits kept, rules obeyed, errors lower than those of a mixture."""

from __future__ import annotations

import itertools
import random
import re
import struct
from pathlib import Path

import numpy as np
import pytest

from ikpy import Batch, Context, ContextParams, Model, default_model_path
from ikpy.cli.quantize import run
from ikpy.gguf.reader import GGUFFile
from ikpy.gguf.types import GGUFValueType
from ikpy.gguf.writer import GGUFWriter
from ikpy.quants import dequantize, registry
from ikpy.quants.recipe import SizeTarget
from ikpy.tools import quantize_target
from ikpy.tools.quantize_plan import QuantizeOptions, Step, make_plan
from ikpy.tools.quantize_progress import PlainDisplay
from ikpy.tools.quantize_target import Point, Tensor, allocate, sample, tensor_errors
from ikpy.tools.resumable import ResumableOutput
from ikpy.tools.tensor_convert import can_encode, encode
from ikpy.vocab import Vocab

MODEL = str(default_model_path())
TYPES = "iq2_k,iq3_k,iq4_k,iq5_k,q8_0"
SHAPES = {
    "token_embd.weight": (64, 256),
    "blk.0.attn_norm.weight": (256,),
    "blk.0.attn_q.weight": (128, 256),
    "blk.0.attn_output.weight": (128, 256),
    "blk.0.ffn_up_exps.weight": (4, 32, 256),
    "blk.0.ffn_down_exps.weight": (4, 64, 96),
    "output.weight": (64, 256),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """Matrices of different difficulty: one has a few large rows, one has large columns."""
    rng = np.random.default_rng(3)
    folder = tmp_path_factory.mktemp("target")
    with GGUFWriter(folder / "in.gguf") as writer:
        writer.add("general.architecture", GGUFValueType.STRING, "llama")
        writer.add("llama.block_count", GGUFValueType.UINT32, 1)
        for name, shape in SHAPES.items():
            writer.add_tensor(name, shape[::-1], 0)
        for name, shape in SHAPES.items():
            values = rng.standard_normal(shape).astype(np.float32)
            if "attn_q" in name:
                values[:, ::17] *= 20
            writer.write(name, values)
    return folder / "in.gguf"


@pytest.fixture(scope="module")
def imatrix(tmp_path_factory) -> Path:
    rng = np.random.default_rng(9)
    data = b""
    sizes = {"blk.0.attn_q.weight": 256, "blk.0.attn_output.weight": 256, "blk.0.ffn_up_exps.weight": 4 * 256}
    for name, n in sizes.items():
        values = rng.gamma(0.5, 1.0, n).astype("<f4")
        data += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", 1, n) + values.tobytes()
    path = tmp_path_factory.mktemp("imatrix") / "im.dat"
    path.write_bytes(struct.pack("<i", len(sizes)) + data)
    return path


def types_of(path: Path) -> dict[str, str]:
    with GGUFFile.open(path) as file:
        return {name: registry.by_id(info.type_id).name for name, info in file.tensors.items()}


def bits_per_weight(path: Path) -> float:
    with GGUFFile.open(path) as file:
        infos = file.tensors.values()
        return 8 * sum(info.nbytes for info in infos) / sum(info.element_count for info in infos)


@pytest.mark.parametrize("size", ["60KiB", "70KB", "0.08MiB", "100K"])
def test_size_is_never_above_the_target_and_close_to_it(model, tmp_path, size):
    limit = {"60KiB": 61440, "70KB": 70000, "0.08MiB": 83886, "100K": 102400}[size]
    assert (
        run(["--target-size", size, "--target-types", TYPES + ",q4_0,q5_0", str(model), str(tmp_path / "o.gguf")]) == 0
    )
    found = (tmp_path / "o.gguf").stat().st_size
    assert 0.94 * limit < found <= limit


@pytest.mark.parametrize("bpw", [3.0, 4.2, 6.0])
def test_bits_per_weight(model, imatrix, tmp_path, bpw, capfd):
    arguments = ["--target-bpw", str(bpw), "--imatrix", str(imatrix), "--target-types", TYPES + ",iq4_nl"]
    assert run([*arguments, str(model), str(tmp_path / "o.gguf"), "2"]) == 0
    assert 0.9 * bpw < bits_per_weight(tmp_path / "o.gguf") <= bpw
    err = capfd.readouterr().err
    assert f"target {bpw:g} BPW: chose types of 6 tensors, 3 of them weighted by the importance matrix" in err
    assert re.search(r"target: +ffn_up_exps +\d\.\d{3} BPW, relative error \d\.\d\de-\d\d: 1 iq", err)


def test_rules_and_options_are_fixed_choices(model, tmp_path):
    rules = "attn_q=q8_0,ffn_down=q6_0"
    arguments = ["--target-bpw", "6", "--custom-q", rules, "--output-tensor-type", "q6_K", "--target-types", TYPES]
    assert run([*arguments, str(model), str(tmp_path / "o.gguf")]) == 0
    types = types_of(tmp_path / "o.gguf")
    assert types["blk.0.attn_q.weight"] == "q8_0"
    assert types["blk.0.ffn_down_exps.weight"] == "q6_0"
    assert types["output.weight"] == "q6_K"
    assert types["blk.0.attn_norm.weight"] == "f32"
    assert 5.5 < bits_per_weight(tmp_path / "o.gguf") <= 6


def test_interleaved_types_and_file_type(model, tmp_path):
    """With an interleaved TYPE every tensor but embeddings gets the interleaved form; without TYPE it is found."""
    target = tmp_path / "o.gguf"
    arguments = ["--target-bpw", "4.6", "--target-types", "iq2_k,iq3_k,iq4_k,iq5_k,q4_0,q5_0", str(model), str(target)]
    assert run([*arguments, "IQ4_K_R4"]) == 0
    types = types_of(target)
    assert all(("_r4" in t or "_r8" in t) for name, t in types.items() if "blk" in name and "norm" not in name)
    assert "_r" not in types["token_embd.weight"]
    with GGUFFile.open(target) as file:
        assert file.metadata["general.file_type"] == 340
    assert run(arguments) == 0
    with GGUFFile.open(target) as file:
        found = registry.ftype_by_id(file.metadata["general.file_type"]).base_type
    assert found in types_of(target).values()


def test_errors_are_lower_than_those_of_a_mixture(model, imatrix):
    """Same bytes, smaller sum of errors weighted by the weights a token meets than IQ3_K's own mixture."""
    from ikpy.tools.imatrix_file import read_imatrix

    matrix = read_imatrix(imatrix)
    with GGUFFile.open(model) as file:
        mixture = make_plan(file, QuantizeOptions(registry.ftype_by_name("IQ3_K"), imatrix=matrix))
        options = QuantizeOptions(
            None,
            imatrix=matrix,
            target=SizeTarget(0, mixture.bits_per_weight, tuple(f"{TYPES},q6_K,iq4_nl".split(","))),
        )
        chosen = make_plan(file, options, allocate(file, "o.gguf", options, PlainDisplay(lambda text: None)).types)
        assert chosen.nbytes <= mixture.nbytes

        def total(plan) -> float:
            steps = [step for step in plan.steps if step.free]
            errors = [tensor_errors(file, step, [step.type], 1)[step.type] for step in steps]
            weights = [quantize_target.sensitivity(file, step) for step in steps]
            return float(np.dot(errors, weights))

        print(f"weighted error {total(chosen):.4g}, mixture {total(mixture):.4g}")
        assert total(chosen) < total(mixture)


def test_better_than_the_mixture_on_a_real_model(tmp_path):
    """KL divergence from the bundled F16 model: below two thirds of IQ3_K's at the same size."""
    mixture, chosen = tmp_path / "mixture.gguf", tmp_path / "chosen.gguf"
    assert run([MODEL, str(mixture), "IQ3_K", "2"]) == 0
    size = str(mixture.stat().st_size)
    assert (
        run(["--target-size", size, "--target-types", "iq2_k,iq3_ks,iq3_k,iq4_ks,iq5_ks", MODEL, str(chosen), "2"]) == 0
    )
    assert chosen.stat().st_size <= mixture.stat().st_size
    exact = log_probabilities(MODEL)
    found = {
        path.stem: float((np.exp(exact) * (exact - log_probabilities(str(path)))).sum(-1).mean())
        for path in (mixture, chosen)
    }
    print(found)
    assert found["chosen"] < 0.66 * found["mixture"], found


def log_probabilities(path: str) -> np.ndarray:
    """Of every token after each of 512, float64 [512, V]."""
    context = Context(Model.load(path), ContextParams(n_ctx=512, n_threads=1))
    with GGUFFile.open(path) as file:
        vocab = Vocab.from_metadata(file.metadata)
    text = (default_model_path().parent / "demo-text.txt").read_text()
    logits = context.decode(Batch.single(vocab.tokenize(text)[:512], logits="all")).astype(np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def test_interrupted_run_makes_the_same_choice_again(model, imatrix, tmp_path, monkeypatch, capfd):
    """The choice is measured anew, comes out equal, and the unfinished output is continued."""
    arguments = ["--target-bpw", "4.4", "--imatrix", str(imatrix), "--target-types", TYPES + ",iq4_nl", str(model)]
    real, calls = ResumableOutput.pad, []

    def interrupt(self, index, position):
        real(self, index, position)
        calls.append(position)
        if len(calls) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(ResumableOutput, "pad", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run([*arguments, str(tmp_path / "o.gguf"), "2"])
    monkeypatch.setattr(ResumableOutput, "pad", real)
    capfd.readouterr()
    assert run([*arguments, str(tmp_path / "o.gguf"), "1"]) == 0
    assert "going on with the unfinished" in capfd.readouterr().err
    assert run([*arguments, str(tmp_path / "whole.gguf"), "2"]) == 0
    assert (tmp_path / "o.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()


def test_saved_decisions_are_repeated(model, imatrix, tmp_path, capfd):
    """The rules written in a dry run give the file that the target gives."""
    recipe, target, again = tmp_path / "recipe.txt", tmp_path / "o.gguf", tmp_path / "again.gguf"
    choice = ["--target-bpw", "4.4", "--target-types", TYPES + ",iq4_nl", "--imatrix", str(imatrix)]
    assert run(["--dry-run", "--save-recipe", str(recipe), *choice, str(model), str(target), "IQ4_K", "2"]) == 0
    assert run([*choice, str(model), str(target), "IQ4_K"]) == 0
    capfd.readouterr()
    assert run(["--custom-q", str(recipe), "--imatrix", str(imatrix), str(model), str(again), "IQ4_K"]) == 0
    assert "has no effect" not in capfd.readouterr().err
    assert target.read_bytes() == again.read_bytes()
    assert recipe.read_text().startswith("# 0.0")
    arguments = ["--save-recipe", str(tmp_path / "no" / "r.txt"), str(model), str(again), "Q8_0"]
    assert run(arguments) == 1
    assert "r.txt: cannot write: No such file or directory" in capfd.readouterr().err


def test_dry_run_prints_the_choice_and_writes_nothing(model, tmp_path, capfd):
    arguments = ["--dry-run", "--target-size", "80KiB", "--target-types", TYPES + ",q4_0", str(model)]
    assert run([*arguments, str(tmp_path / "o.gguf")]) == 0
    err = capfd.readouterr().err
    assert "target 0.078 MiB: chose types of 6 tensors" in err
    assert "output size = " in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("size", "status", "message"), [("10KiB", 1, "is below the smallest"), ("1GiB", 0, "chose types of 6 tensors")]
)
def test_nothing_is_measured_where_the_sizes_decide(model, tmp_path, monkeypatch, capfd, size, status, message):
    """Targets below the smallest types fail at once; where the tensors fit as they are, they are kept."""

    def measured(*_):
        raise AssertionError("errors were measured")

    monkeypatch.setattr(quantize_target, "tensor_errors", measured)
    output = tmp_path / "o.gguf"
    assert run(["--target-size", size, "--target-types", TYPES + ",q4_0", str(model), str(output)]) == status
    assert message in capfd.readouterr().err
    if status == 0:
        assert types_of(output) == types_of(model)


INTERLEAVED = [row.name for row in registry.all_types() if row.interleave > 1 and can_encode(row.name)]


@pytest.mark.parametrize("name", INTERLEAVED)
def test_interleaved_types_as_candidates(name, tmp_path, capfd):
    """Also for rows and numbers of rows that it does not fit: these tensors get another one."""
    shapes = {"whole": (32, 512), "short": (32, 96), "few": (30, 256), "experts": (3, 16, 32)}
    rng = np.random.default_rng(4)
    with GGUFWriter(tmp_path / "in.gguf") as writer:
        writer.add("general.architecture", GGUFValueType.STRING, "llama")
        writer.add("llama.block_count", GGUFValueType.UINT32, 1)
        for kind, shape in shapes.items():
            writer.add_tensor(f"blk.0.{kind}.weight", shape[::-1], 0)
        for kind, shape in shapes.items():
            writer.write(f"blk.0.{kind}.weight", rng.standard_normal(shape).astype(np.float32))
    output, row = tmp_path / "o.gguf", registry.by_name(name)
    options = ["--ignore-imatrix-rules", "--target-bpw", "20", "--target-types", f"{name},q8_0"]
    assert run([*options, str(tmp_path / "in.gguf"), str(output)]) == 0, capfd.readouterr().err
    for tensor, kind in types_of(output).items():
        shape = shapes[tensor.split(".")[2]]
        partner = registry.by_name(kind)
        assert kind in (name, row.plain_partner, "q8_0", "f32") and shape[-1] % partner.block_elements == 0, tensor


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target-size", "10KiB", "IN", "o.gguf"], "is below the smallest possible size of "),
        (["--target-bpw", "0.5", "IN", "o.gguf"], "is below the smallest possible size of "),
        (["--target-size", "much", "IN", "o.gguf"], "--target-size: 'much' is no size such as 24GiB"),
        (["--target-bpw", "x", "IN", "o.gguf"], "--target-bpw: 'x' is no number of bits"),
        (["--target-bpw", "4", "--target-size", "1G", "IN", "o.gguf"], "cannot be given together"),
        (["--target-types", "q4_0", "IN", "o.gguf", "Q4_0"], "--target-types needs --target-size or --target-bpw"),
        (["--target-bpw", "4", "--target-types", "q4_9", "IN", "o.gguf"], "unknown tensor type 'q4_9'"),
        (["--target-bpw", "4", "--pure", "IN", "o.gguf"], "--pure and a target exclude each other"),
        (["--target-bpw", "4", "IN", "o.gguf", "COPY"], "COPY and a target exclude each other"),
        (["--target-bpw", "4", "IN", "o.gguf", "F16"], "type F16 and a target exclude each other"),
        (["--target-bpw", "4", "--attn-q-type", "q4_0", "IN", "o.gguf"], "fix these tensors with --custom-q"),
        (["--target-bpw", "4", "--custom-q", ".=q4_0", "IN", "o.gguf"], "there is nothing to choose for the target"),
        (["--target-bpw", "4", "--target-types", "iq4_k", "IN", "o.gguf"], "fits tensor blk.0.ffn_down_exps.weight"),
    ],
)
def test_wrong_use(model, tmp_path, monkeypatch, capfd, arguments, message):
    monkeypatch.chdir(tmp_path)
    if "fits tensor" in message:
        assert run([*make_f16(model, tmp_path), *arguments[:4], "f16.gguf", "o.gguf"]) == 1
    else:
        assert run([str(model) if word == "IN" else word for word in arguments]) == 1
    err = capfd.readouterr().err
    assert sum(message in line for line in err.splitlines()) == 1, err[-500:]
    assert not (tmp_path / "o.gguf").exists()


def make_f16(model: Path, folder: Path) -> list[str]:
    """A quantized source: its own types do not count as choices then."""
    assert run(["--pure", str(model), str(folder / "f16.gguf"), "Q8_0"]) == 0
    return ["--allow-requantize"]


# the choice itself


def random_tensors(rng: random.Random) -> list[Tensor]:
    tensors = []
    for _ in range(4):
        sizes = sorted(rng.sample(range(1, 60), 5))
        errors = sorted((rng.random() ** 3 for _ in range(5)), reverse=True)
        points = [Point(f"t{i}", size, error) for i, (size, error) in enumerate(zip(sizes, errors, strict=True))]
        tensors.append(Tensor(Step("x", None, "f32", "f32"), points))  # type: ignore[arg-type]
    return tensors


@pytest.mark.parametrize("seed", range(20))
def test_choice_is_near_the_best_one(seed):
    """Against all combinations: within the limit, and off by no more than one upgrade of one tensor."""
    rng = random.Random(seed)
    tensors = random_tensors(rng)
    smallest = sum(tensor.points[0].nbytes for tensor in tensors)
    largest = sum(tensor.points[-1].nbytes for tensor in tensors)
    budget = rng.randint(smallest, largest)
    quantize_target.spend(tensors, budget)
    spent = sum(tensor.point.nbytes for tensor in tensors)
    error = sum(tensor.point.error for tensor in tensors)
    assert spent <= budget
    best = min(
        sum(point.error for point in points)
        for points in itertools.product(*(tensor.points for tensor in tensors))
        if sum(point.nbytes for point in points) <= budget
    )
    worst_step = max(a.error - b.error for t in tensors for a, b in itertools.pairwise(t.points))
    print(f"seed {seed}: {error:.4f}, best {best:.4f}")
    assert best <= error <= best + worst_step


def test_samples_cover_matrices_and_rows():
    rows = dict(sample((4096, 2048, 256), 4))
    assert len(rows) == quantize_target.SAMPLE_MATRICES
    assert min(rows) == 0 and max(rows) == 255
    for matrix, chosen in rows.items():
        assert all(matrix * 2048 <= row < (matrix + 1) * 2048 and row % 4 == 0 for row in chosen)
    assert sum(map(len, rows.values())) * 4 * 4096 <= quantize_target.SAMPLE_ELEMENTS * 2
    assert sample((256, 3), 1) == [(0, [0, 1, 2])]


def test_sampled_errors_agree_with_all_rows(model, monkeypatch):
    with GGUFFile.open(model) as file:
        info = file.tensors["blk.0.attn_q.weight"]
        step = Step(info.name, info, "f32", "iq3_k")
        whole = tensor_errors(file, step, ["iq3_k"], 1)["iq3_k"]
        monkeypatch.setattr(quantize_target, "SAMPLE_ELEMENTS", 32 * 256)
        part = tensor_errors(file, step, ["iq3_k"], 1)["iq3_k"]
        assert part == pytest.approx(whole, rel=0.15)
        assert tensor_errors(file, step, ["f32"], 1) == {"f32": 0.0}


def test_errors_are_those_of_inference(model):
    """Scales of some trellis types have a factor in products that decoding a file does not have."""
    with GGUFFile.open(model) as file:
        info = file.tensors["blk.0.attn_output.weight"]
        step = Step(info.name, info, "f32", "iq2_kt")
        measured = tensor_errors(file, step, ["iq2_kt"], 1)["iq2_kt"]
        values = file.data(info).view(np.float32).reshape(info.shape[::-1])
    coded = encode(values, registry.by_name("iq2_kt"), None, 1, info.name)
    used = dequantize(coded, "iq2_kt", info.shape, compute_scale=True)
    assert measured == pytest.approx(np.square(values - used).sum() / np.square(values).sum(), rel=1e-4)
