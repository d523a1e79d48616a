"""Options of `ikpy bench`: every option takes a value, most take comma lists, all may be repeated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ikpy.cli import placement_values, values
from ikpy.cli.bench_values import (
    COUNT,
    to_cuda_params,
    to_device_names,
    to_generation,
    to_mapped,
    to_off,
    to_overrides,
    to_test,
    to_thread_pair,
    to_threads_pair,
)
from ikpy.cli.flags.loading import LOAD_MODES, PAGE_CACHE
from ikpy.cli.flags.placement import ASYNCHRONOUS
from ikpy.cli.options import NO_GPU, Kind, Option
from ikpy.cli.thread_options import to_mask
from ikpy.cli.values import Warn

OUTPUTS = ("md", "csv", "json", "jsonl", "sql", "none")


@dataclass(frozen=True)
class BenchOption:
    """One option.

    `separator` divides the text into several values ("" = the text is one value); `many` values accumulate,
    otherwise only the first counts. `flag` needs no value, `ranges` are numbers such as 1-8. `idle` is the value that
    asks for what happens anyway, so that the warning of an option without effect is left out.
    """

    names: tuple[str, ...]
    dest: str
    metavar: str
    help: str
    convert: Callable[[str, Warn], Any] = values.to_int
    separator: str = ","
    many: bool = True
    switch: bool = False
    flag: bool = False
    ranges: bool = False
    no_effect: str = ""
    idle: Any = None


def row(names: str, dest: str, metavar: str, text: str, **more: Any) -> BenchOption:
    """A row of the table."""
    if more.get("flag"):
        more.setdefault("convert", values.to_switch)
    return BenchOption(tuple(names.split()), dest, metavar, text, **more)


def switch(
    names: str, dest: str, text: str, *, many: bool = False, no_effect: str = "", idle: bool = False
) -> BenchOption:
    """An option with value 0 or 1."""
    names_tuple = tuple(names.split())
    return BenchOption(
        names_tuple, dest, "0|1", text, values.to_switch, many=many, switch=True, no_effect=no_effect, idle=idle
    )


GRAPH_SPLIT = "in graph mode all devices share every layer"
NO_FIT = "give -ngl and -ncmoe: a benchmark says what it measures"
MERGED = "the file's tensors are used as they are"
ROWS = (
    row("-m --model", "models", "FILE", "GGUF file (default: the bundled tiny-mla-moe)", convert=values.to_text),
    row("-hf -hfr --hf-repo", "hf_repos", "REPO", "model on the Hugging Face hub", convert=values.to_text),
    row("-hff --hf-file", "hf_files", "FILE", "file in the repository of the same place", convert=values.to_text),
    row(
        "-hft --hf-token",
        "hf_token",
        "TEXT",
        "access token of the hub (default: $HF_TOKEN)",
        convert=values.to_text,
        separator="",
        many=False,
    ),
    row("--offline", "offline", "", "take -hf from the cache only", flag=True, many=False),
    row("-p --n-prompt", "n_prompt", "N", "prompt tokens; 0 = no such test (default: 512)", convert=COUNT, ranges=True),
    row("-n --n-gen", "n_gen", "N", "generated tokens; 0 = no such test (default: 128)", convert=COUNT, ranges=True),
    row("-pg", "prompts_generated", "PP,TG", "prompt, then generation, timed together", convert=to_test, separator=""),
    row("-d --n-depth", "n_depth", "N", "tokens in the cache before (default: 0)", convert=COUNT, ranges=True),
    row("-gp", "generated_at_depth", "PP,TG", "generation after a prompt", convert=to_generation, separator=""),
    row("-b --batch-size", "n_batch", "N", "logical batch (default: 2048)", convert=values.bounded(1), ranges=True),
    row("-ub --ubatch-size", "n_ubatch", "N", "physical batch (default: 512)", convert=values.bounded(0), ranges=True),
    row("-ctk --cache-type-k", "type_k", "TYPE", "type of the K cache (default: f16)", convert=values.to_cache_type),
    row("-ctv --cache-type-v", "type_v", "TYPE", "type of the V cache (default: f16)", convert=values.to_cache_type),
    row("-t --threads", "threads", "N", "threads (default: physical cores)", convert=to_thread_pair, ranges=True),
    row(
        "-tgb --threads-gen-batch",
        "threads",
        "G,B",
        "threads for generation and for batches; pairs are separated by ;",
        convert=to_threads_pair,
        separator=";",
    ),
    switch("-fa --flash-attn", "flash_attn", "flash attention (default: 1)", many=True),
    row(
        "-mla --mla-use --mla-attn",
        "mla_attn",
        "0..3",
        "mode of multi-head latent attention (default: 3)",
        convert=values.bounded(0, 3),
    ),
    row(
        "-amb --attention-max-batch --attn-max-batch",
        "attn_max_batch",
        "MiB",
        "bound on the attention scratch; 0 = none (default: 0)",
        convert=values.to_attention_batch,
    ),
    row(
        "-ser --smart-expert-reduction",
        "ser",
        "K,t",
        "expert reduction; pairs are separated by ; (default: -1,0)",
        convert=values.to_expert_reduction,
        separator=";",
    ),
    switch(
        "-mmp --mmap",
        "use_mmap",
        "map the file (default: 1)",
        many=True,
    ),
    row(
        "-lm --load-mode",
        "use_mmap",
        "|".join(LOAD_MODES),
        "auto, mmap and mmap+mlock are -mmp 1, the others -mmp 0; pages are not locked",
        convert=to_mapped,
    ),
    row(
        "-lzm --lazy-mode",
        "lazy_mode",
        "on|off|auto",
        "on: mapped weights are read when they are needed, else before the first test if memory holds them",
        convert=values.choice("on", "off", "auto"),
        many=False,
    ),
    switch("-embd --embeddings", "embeddings", "embedding output (default: 0)", many=True),
    switch(
        "-fmoe --fused-moe",
        "fused_moe",
        "fused up and gate product of experts (default: 1)",
        no_effect="the graph compiler always fuses",
        idle=True,
    ),
    switch(
        "-rtr --run-time-repack --repack",
        "repack",
        "rearrange weights after loading (default: 0)",
        many=True,
    ),
    row("-nr --no-repack", "repack", "", "the same as -rtr 0", convert=to_off, flag=True),
    row("-dr --dry-run", "dry_run", "", "print the memory of every test, read no tensor data", flag=True, many=False),
    row(
        "-r --repetitions",
        "repetitions",
        "N",
        "repetitions of each test (default: 5)",
        convert=values.bounded(1),
        many=False,
    ),
    switch("-w --warmup", "warmup", "one untimed step before each test (default: 1)"),
    row(
        "-o --output",
        "output",
        "|".join(OUTPUTS),
        "form of the results (default: md)",
        convert=values.choice(*OUTPUTS),
        many=False,
    ),
    row(
        "-oe --output-err",
        "output_err",
        "|".join(OUTPUTS),
        "form of results also written to standard error (default: none)",
        convert=values.choice(*OUTPUTS),
        many=False,
    ),
    row("--no-warmup", "warmup", "", "the same as -w 0", convert=to_off, flag=True, many=False),
    row(
        "--delay",
        "delay",
        "SECONDS",
        "pause before each test (default: 0)",
        convert=values.bounded(0, 3600),
        many=False,
    ),
    row("--progress", "progress", "", "a line on standard error for each test", flag=True, many=False),
    row("--list-devices", "list_devices", "", "print the devices and end", flag=True, many=False),
    row("-v --verbose", "verbose", "", "log lines, and a traceback with errors", flag=True, many=False),
    row(
        "-ngl --n-gpu-layers",
        "n_gpu_layers",
        "N",
        "layers on the GPU (default: 999)",
        convert=placement_values.to_gpu_layers,
        ranges=True,
        no_effect=NO_GPU,
    ),
    row(
        "-dev --device",
        "devices",
        "CUDA0/...|none",
        "devices to use (default: all)",
        convert=to_device_names,
        separator="",
        many=False,
        no_effect=NO_GPU,
    ),
    switch(
        "-nopo --no-op-offload", "no_op_offload", "large batches of weights in host memory stay there", no_effect=NO_GPU
    ),
    switch("--no-host", "", "no host buffers", no_effect="weights of the CPU are never in a GPU's host buffers"),
    switch("-dio --direct-io", "", "read past the page cache", no_effect=PAGE_CACHE),
    row("-C --cpu-mask", "mask", "HEX", "CPUs that threads run on", convert=to_mask, many=False),
    row("--cpu-strict", "strict", "0|1", "1: a CPU for each thread", convert=values.to_switch, many=False),
    row("--prio", "priority", "N", "priority of threads, -1 to 3", convert=values.bounded(-1, 3), many=False),
    row("--poll", "poll", "N", "how long threads wait, 0 to 100", convert=values.bounded(0, 100), many=False),
    row(
        "--n-cpu-moe -ncmoe",
        "n_cpu_moe",
        "N",
        "expert layers in host memory",
        convert=COUNT,
        many=False,
        no_effect=NO_GPU,
    ),
    row(
        "-sm --split-mode",
        "split_mode",
        "none|layer|row|attn|graph|tensor",
        "division among GPUs (default: layer); row, attn and tensor are read as layer",
        convert=values.choice("none", "layer", "row", "attn", "graph", "tensor"),
        no_effect=NO_GPU,
    ),
    row("-mg --main-gpu", "main_gpu", "I", "main GPU (default: 0)", convert=COUNT, no_effect=NO_GPU),
    row(
        "-ts --tensor-split",
        "tensor_split",
        "A/B/...",
        "share of each GPU",
        convert=placement_values.to_tensor_split,
        no_effect=NO_GPU,
    ),
    switch(
        "-nkvo --no-kv-offload", "no_kv_offload", "KV cache in host memory (default: 0)", many=True, no_effect=NO_GPU
    ),
    row(
        "-ot --override-tensor",
        "override_tensor",
        "REGEX=BUFFER,...",
        "buffer of the tensors whose name matches",
        convert=to_overrides,
        separator="",
        many=False,
    ),
    switch("--print-overrides", "print_overrides", "show the overrides as a column (default: 0)"),
    row(
        "-cuda --cuda-params",
        "cuda_params",
        "K=V,...",
        "parameters of the CUDA backend",
        convert=to_cuda_params,
        separator="",
        many=False,
        no_effect=NO_GPU,
    ),
    row(
        "-rpc --rpc",
        "hosts",
        "HOST:PORT,...",
        "machines that run `ikpy rpc-server`: further devices",
        convert=placement_values.to_hosts,
        separator="",
        many=False,
    ),
    row("--max-gpu", "max_gpu", "N", "GPUs per layer in graph mode", many=False, no_effect=GRAPH_SPLIT),
    switch("-fit --fit", "", "place tensors automatically", no_effect=NO_FIT),
    row("-fitt --fit-target --fit-margin", "", "MiB", "memory left free on each GPU", many=False, no_effect=NO_FIT),
    row("-fitc --fit-ctx", "", "N", "least context that --fit may choose", many=False, no_effect=NO_FIT),
    switch(
        "-gr --graph-reuse",
        "reuse",
        "reuse of compiled graphs (default: 1)",
        many=True,
        no_effect="compiled graphs are always reused",
        idle=True,
    ),
    switch("-mqkv --merge-qkv", "mqkv", "merge Q, K, V weights", no_effect=MERGED),
    switch("-muge --merge-up-gate-experts", "muge", "merge up and gate experts", no_effect=MERGED),
    switch(
        "-rcache --rope-cache",
        "rcache",
        "rotation angles computed once per batch (default: 1)",
        no_effect="the angles are always computed once",
        idle=True,
    ),
    switch(
        "-thp --transparent-huge-pages", "use_thp", "read the file into huge pages, reserved ones if enough are free"
    ),
    switch("-ger --grouped-expert-routing", "grouped_er", "experts from the best groups only, if the model has groups"),
    switch(
        "-no-fug --no-fused-up-gate",
        "no_fused_up_gate",
        "no fused dense up and gate product",
        no_effect="the graph compiler always fuses",
    ),
    switch("-no-ooae --no-offload-only-active-experts", "no_ooae", "copy all experts", no_effect=NO_GPU),
    switch("-sas --scheduler-async", "sas", "asynchronous evaluation of graph parts", no_effect=ASYNCHRONOUS),
    row(
        "--numa",
        "numa",
        "distribute|isolate|numactl",
        "machines with several memory nodes: threads in turn on all nodes, on the starting node, or as inherited",
        convert=values.to_numa,
        many=False,
    ),
    row(
        "--defer-experts",
        "defer_experts",
        "",
        "read experts of the mapped file when they are needed, not before the first test",
        flag=True,
        many=False,
    ),
)
SOURCES = ("mask", "strict", "priority", "poll", "hf_repos", "hf_files", "hf_token", "offline", "list_devices")
"""Values that the program uses itself."""
BY_NAME = {name: option for option in ROWS for name in option.names}


def help_rows() -> list[Option]:
    """The table as rows of a help text: what has an effect, what wants a GPU, and the rest with the reason."""
    groups: dict[str, list[Option]] = {"Options": [], "With a CUDA device": [], "Accepted, without effect": []}
    for option in ROWS:
        in_vain = option.no_effect not in ("", NO_GPU)
        group = list(groups)[2 if in_vain else 1 if option.no_effect else 0]
        text = f"{option.help}; {option.no_effect}" if in_vain else option.help
        groups[group].append(Option(option.names, Kind(option.metavar), "", text, group=group))
    return [row for rows in groups.values() for row in rows]
