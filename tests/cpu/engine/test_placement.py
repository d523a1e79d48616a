"""Device of every tensor from -ngl, -ts, -sm, -mg, -ot, -cmoe, -ncmoe and -nkvo."""

from __future__ import annotations

import pytest

from ikpy.engine.model import open_model
from ikpy.engine.params import ModelParams
from ikpy.errors import UsageError
from ikpy.graph.offload_policy import offload_policy, policy_lines
from ikpy.graph.placement import (
    CPU,
    Device,
    PlacementParams,
    cpu_expert_layers,
    place,
    placement_lines,
)
from ikpy.quants.name_pattern import compile_pattern

N_LAYER = 8
ONE = (Device("CUDA0"),)
TWO = (Device("CUDA0", 3), Device("CUDA1", 1))


def model(n_layer: int = N_LAYER, dense: int = 2) -> dict[str, int]:
    """Names and sizes of a model with experts above the first layers."""
    sizes = {"token_embd.weight": 100, "output_norm.weight": 1, "output.weight": 100}
    for il in range(n_layer):
        sizes |= {f"blk.{il}.attn_q.weight": 10, f"blk.{il}.attn_kv_b.weight": 5, f"blk.{il}.ffn_norm.weight": 1}
        if il < dense:
            sizes |= {f"blk.{il}.ffn_{part}.weight": 20 for part in ("gate", "up", "down")}
        else:
            sizes |= {f"blk.{il}.ffn_{part}_exps.weight": 300 for part in ("gate", "up", "down")}
    return sizes


def test_without_devices_everything_is_on_the_cpu_and_device_rules_are_ignored() -> None:
    params = PlacementParams(n_gpu_layers=99, rules=(("exps", "CPU"), ("attn", "CUDA0")))
    placed = place(model(), N_LAYER, params)
    assert set(placed.tensors.values()) == {CPU} and set(placed.caches) == {CPU}
    assert placed.rules[0].taken == 18 and placed.rules[0].taken_bytes == 18 * 300
    assert placed.warnings == ["-ot attn=CUDA0: there is no device CUDA0; the rule is ignored"]


def test_blocks_behind_the_layers_count_for_no_device() -> None:
    """Layers that predict further tokens stay in host memory."""
    plain, longer = model(), model(N_LAYER + 1)
    params = PlacementParams(tensor_split=(1, 1))
    placed = place(longer, N_LAYER, params, TWO)
    assert placed.layers == place(plain, N_LAYER, params, TWO).layers
    assert {placed.tensors[name] for name in longer.keys() - plain.keys()} == {CPU}


def test_a_device_may_hold_experts_only() -> None:
    """-ts 1,0 with rules, as documented: the cache and all else lie on the first device."""
    rules = ((r"blk\.[45]\.ffn_.*_exps", "CUDA1"), ("exps", CPU))
    placed = place(model(), N_LAYER, PlacementParams(n_gpu_layers=99, tensor_split=(1, 0), rules=rules), TWO)
    assert {*placed.caches, *placed.layers, placed.output} == {"CUDA0"} and not placed.warnings
    on_second = {name for name, device in placed.tensors.items() if device == "CUDA1"}
    assert on_second == {f"blk.{il}.ffn_{part}_exps.weight" for il in (4, 5) for part in ("gate", "up", "down")}


@pytest.mark.parametrize(
    ("n", "layers", "output"), [(0, 0, CPU), (3, 3, CPU), (8, 8, CPU), (9, 8, "CUDA0"), (-1, 8, "CUDA0")]
)
def test_the_last_layers_are_offloaded_and_the_output_above_their_number(n: int, layers: int, output: str) -> None:
    placed = place(model(), N_LAYER, PlacementParams(n_gpu_layers=n), ONE)
    assert placed.layers == (CPU,) * (N_LAYER - layers) + ("CUDA0",) * layers
    assert placed.output == output == placed.tensors["output.weight"] == placed.tensors["output_norm.weight"]
    assert placed.tensors["token_embd.weight"] == CPU
    assert placed.caches == placed.layers


def test_first_matching_rule_wins_and_patterns_are_not_anchored() -> None:
    rules = ((r"blk\.(3|4)\.ffn_.*_exps.", "CUDA1"), ("exps", "CPU"), ("ffn_up_exps", "CUDA0"), ("nothing", "CPU"))
    placed = place(model(), N_LAYER, PlacementParams(rules=rules), TWO)
    assert {placed.tensors[f"blk.{il}.ffn_up_exps.weight"] for il in (3, 4)} == {"CUDA1"}
    assert {placed.tensors[f"blk.{il}.ffn_up_exps.weight"] for il in (2, 5, 6, 7)} == {CPU}
    assert [(r.matched, r.taken) for r in placed.rules] == [(6, 6), (18, 12), (6, 0), (0, 0)]
    assert placed.warnings == [
        "-ot ffn_up_exps=CUDA0 has no effect: earlier rules take all 6 tensors that it matches",
        "-ot nothing=CPU matches no tensor of this model",
    ]
    experts = [rule.line for rule in placed.rules[:2]]
    assert experts[0].endswith("MiB") and experts[1].endswith("MiB (6 more go by earlier rules)")
    rules = (("ffn_up", CPU), (r"blk\.3\.ffn_up_exps", "CUDA0"))
    assert place(model(), N_LAYER, PlacementParams(rules=rules), TWO).warnings == [
        r"-ot blk\.3\.ffn_up_exps=CUDA0 has no effect: earlier rules take the tensor that it matches"
    ]


def test_patterns_may_name_posix_classes() -> None:
    """ECMAScript knows `[[:digit:]]`; Python reads it as a set followed by a bracket."""
    names = [f"blk.{i}.ffn_up.weight" for i in (0, 7, 12)]
    found = {r"blk\.[[:digit:]]\.": 2, r"blk\.[x[:digit:]]+\.ffn": 3, "[[:upper:]]": 0, "_[[:alpha:]]p[^[:alnum:]]": 3}
    for pattern, count in found.items():
        assert sum(bool(compile_pattern(pattern).search(name)) for name in names) == count, pattern
    rules = ((r"blk\.[[:digit:]]\.", CPU),)
    placed = place(dict.fromkeys(names, 8), 13, PlacementParams(rules=rules), ONE)
    assert [placed.device_of(name) for name in names] == [CPU, CPU, "CUDA0"]


def test_rules_reach_layers_that_are_not_offloaded() -> None:
    params = PlacementParams(n_gpu_layers=0, rules=(("attn_q", "CUDA0"),))
    placed = place(model(), N_LAYER, params, ONE)
    assert placed.tensors["blk.0.attn_q.weight"] == "CUDA0" and placed.layers == (CPU,) * N_LAYER


def test_unknown_devices_and_bad_patterns_are_errors() -> None:
    with pytest.raises(UsageError, match="available buffer types: CPU, CUDA0"):
        place(model(), N_LAYER, PlacementParams(rules=(("exps", "CUDA7"),)), ONE)
    with pytest.raises(UsageError, match="not a regular expression"):
        place(model(), N_LAYER, PlacementParams(rules=(("(", "CPU"),)), ONE)
    with pytest.raises(UsageError, match="-mg 2"):
        place(model(), N_LAYER, PlacementParams(split_mode="none", main_gpu=2), TWO)
    with pytest.raises(UsageError, match="-ts has 3 values for 2 devices"):
        place(model(), N_LAYER, PlacementParams(tensor_split=(1, 1, 1)), TWO)
    with pytest.raises(UsageError, match="not negative"):
        place(model(), N_LAYER, PlacementParams(tensor_split=(1, -1)), TWO)


def test_wrong_requests_are_refused_before_the_file_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IKPY_CUDA_EMULATE", "2")
    for params, message in (
        (PlacementParams(rules=(("exps", "CUDA7"),)), "available buffer types: CPU, CUDA0, CUDA1"),
        (PlacementParams(tensor_split=(1, 1, 1)), "-ts has 3 values for 2 devices"),
        (PlacementParams(split_mode="none", main_gpu=2), "-mg 2"),
    ):
        with pytest.raises(UsageError, match=message):
            open_model("no such file", ModelParams(placement=params))


@pytest.mark.parametrize("mode", ["row", "attn", "tensor"])
def test_modes_that_divide_tensors_are_layer_with_a_warning(mode: str) -> None:
    placed = place(model(), N_LAYER, PlacementParams(split_mode=mode), TWO)
    assert placed.layers == place(model(), N_LAYER, PlacementParams(), TWO).layers
    assert placed.warnings == [f"-sm {mode} is read as -sm layer; -sm graph divides tensors among GPUs"]


def test_splits_follow_the_sizes_of_layers() -> None:
    dense = model(dense=N_LAYER)
    dense["output.weight"] = 76 - 1  # as large as a layer
    half = place(dense, N_LAYER, PlacementParams(tensor_split=(1, 1)), TWO)
    assert (half.layers.count("CUDA0"), half.layers.count("CUDA1"), half.output) == (4, 4, "CUDA1")
    third = place(dense, N_LAYER, PlacementParams(tensor_split=(3, 6)), TWO)
    assert (third.layers.count("CUDA0"), third.layers.count("CUDA1")) == (3, 5)
    by_memory = place(dense, N_LAYER, PlacementParams(), TWO)
    assert by_memory.layers.count("CUDA0") == 6
    only_second = place(dense, N_LAYER, PlacementParams(split_mode="none", main_gpu=1), TWO)
    assert set(only_second.layers) == {"CUDA1"} == {only_second.output}
    first_only = place(dense, N_LAYER, PlacementParams(tensor_split=(1,)), TWO)
    assert set(first_only.layers) == {"CUDA0"} == {first_only.output}


def test_experts_of_the_last_layers_stay_on_the_cpu() -> None:
    placed = place(model(), N_LAYER, PlacementParams(n_cpu_moe=2), ONE)
    on_cpu = {name for name, device in placed.tensors.items() if device == CPU}
    assert on_cpu == {"token_embd.weight"} | {
        f"blk.{il}.ffn_{part}_exps.weight" for il in (6, 7) for part in ("up", "gate", "down")
    }
    everything = place(model(), N_LAYER, PlacementParams(n_cpu_moe=999), ONE)
    assert all(everything.tensors[n] == CPU for n in model() if "exps" in n)
    assert everything.tensors["blk.7.attn_q.weight"] == "CUDA0"
    # Rules given by hand come first.
    by_hand = place(model(), N_LAYER, PlacementParams(rules=((r"blk\.7", "CUDA0"),), n_cpu_moe=1), ONE)
    assert by_hand.tensors["blk.7.ffn_up_exps.weight"] == "CUDA0"


def test_experts_of_several_devices_share_the_number() -> None:
    layers = ["CUDA0"] * 6 + ["CUDA1"] * 2
    assert cpu_expert_layers(range(2, 8), layers, 4) == [3, 4, 5, 7]
    assert cpu_expert_layers(range(2, 8), layers, 1) == [5]
    assert cpu_expert_layers(range(2, 8), layers, 0) == []
    assert cpu_expert_layers(range(2, 8), layers, 8) == list(range(2, 8))
    assert cpu_expert_layers(range(2, 8), ["CUDA0"] * 8, 2) == [6, 7]


def test_the_report_says_how_experts_were_shared() -> None:
    def notes(**params: object) -> list[str]:
        placed = place(model(), N_LAYER, PlacementParams(tensor_split=(3, 1), **params), TWO)  # type: ignore[arg-type]
        return [line for line in placement_lines(placed, model(), TWO) if "ncmoe" in line or "    device" in line]

    found = notes(n_cpu_moe=4)
    assert found[0] == "================= llm_load_tensors: split mode layer with ncmoe = 4, 2 devices"
    counts = [[int(word) for word in line.split() if word.isdigit()] for line in found[1:]]
    assert sum(layers for layers, _ in counts) == N_LAYER and sum(taken for _, taken in counts) == 4
    assert found[1].startswith("    device 0: ") and found[1].endswith(" overrides")
    assert not notes(n_cpu_moe=N_LAYER) and not notes() and not notes(n_cpu_moe=4, split_mode="none")


def test_cache_without_offload_is_on_the_cpu() -> None:
    placed = place(model(), N_LAYER, PlacementParams(kv_offload=False), ONE)
    assert set(placed.caches) == {CPU} and set(placed.layers) == {"CUDA0"}


def test_lines_report_rules_layers_and_buffers() -> None:
    sizes = {name: nbytes << 20 for name, nbytes in model().items()}
    placed = place(sizes, N_LAYER, PlacementParams(rules=(("exps", "CPU"),)), ONE)
    lines = placement_lines(placed, sizes, ONE)
    assert "Tensor blk.2.ffn_gate_exps.weight (size = 300.00 MiB) buffer type overridden to CPU" in lines
    assert "llm_load_tensors: override exps=CPU: 18 tensors, 5400.00 MiB" in lines
    assert lines[-5:] == [
        "llm_load_tensors: offloading 8 repeating layers to GPU",
        "llm_load_tensors: offloading non-repeating layers to GPU",
        "llm_load_tensors: offloaded 9/9 layers to GPU",
        "llm_load_tensors:        CPU buffer size =  5500.00 MiB",
        "llm_load_tensors:      CUDA0 buffer size =   349.00 MiB",
    ]


def test_offload_policy_reads_both_numberings() -> None:
    assert offload_policy([(26, False), (27, False), (29, False)]) == {
        "MUL_MAT": False,
        "FUSED_UP_GATE": False,
        "MUL_MAT_ID": False,
        "MOE_FUSED_UP_GATE": False,
    }
    assert offload_policy([(27, False), (31, True)]) == {"MUL_MAT": False, "MOE_FUSED_UP_GATE": True}
    assert offload_policy([(30, False), (27, True)]) == {"FUSED_UP_GATE": False, "MUL_MAT": True}
    every = ("MUL_MAT", "MUL_MAT_ID", "FUSED_UP_GATE", "MOE_FUSED_UP_GATE")
    assert offload_policy([(-1, False)]) == offload_policy([(111, False)]) == dict.fromkeys(every, False)
    assert offload_policy([(110, False)]) == {}
    assert policy_lines([(27, False)]) == ["X" * 21 + " Setting offload policy for op MUL_MAT_ID to OFF"]
    assert (
        policy_lines([(-1, True)])
        == policy_lines([(300, True)])
        == ["X" * 21 + " Setting offload policy for all ops to ON"]
    )
