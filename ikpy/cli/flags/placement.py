"""Options that place tensors and work on devices."""

from ikpy.cli import values
from ikpy.cli.options import FLAG, INT, NO_GPU, TEXT, Kind, ignored, option

SPLIT_MODES = ("none", "layer", "row", "attn", "graph")

ROWS = (
    option(
        "-ngl --gpu-layers --n-gpu-layers",
        INT,
        "model.n_gpu_layers",
        "layers kept on the GPU; -1 = all when there is one",
        env="LLAMA_ARG_N_GPU_LAYERS",
        reason=NO_GPU,
        quiet="0",
    ),
    option(
        "-sm --split-mode",
        Kind("|".join(SPLIT_MODES), values.choice(*SPLIT_MODES)),
        "model.split_mode",
        "how a model is divided among GPUs; row is read as layer",
        reason=NO_GPU,
    ),
    ignored("-mg --main-gpu", NO_GPU, "device for -sm none and for scratch", kind=INT),
    ignored("-ts --tensor-split", NO_GPU, "share of each GPU", kind=Kind("A,B,...")),
    ignored("--max-gpu", NO_GPU, "GPUs per layer in graph mode", kind=INT),
    ignored("-dev --device", NO_GPU, "devices to use", kind=TEXT, quiet="none"),
    ignored("-devd --device-draft", NO_GPU, "devices of the draft model", kind=TEXT, quiet="none"),
    option(
        "-ot --override-tensor",
        Kind("REGEX=BUFFER,...", values.to_tensor_override, many=True),
        "model.tensor_overrides",
        "buffer of the tensors whose name matches; first match wins. Repeatable",
        reason=NO_GPU,
    ),
    option("-cmoe --cpu-moe", Kind(const=999), "model.n_cpu_moe", "all expert tensors in host memory", reason=NO_GPU),
    option(
        "-ncmoe --n-cpu-moe",
        INT,
        "model.n_cpu_moe",
        "expert tensors of the last N layers in host memory",
        reason=NO_GPU,
        quiet="0",
    ),
    option("--fit", FLAG, "model.fit", "place tensors automatically", reason=NO_GPU),
    ignored("--fit-margin", NO_GPU, "memory left free on each GPU", kind=Kind("MiB")),
    ignored("-gfm --gpu-fit-margin", NO_GPU, "memory left free on single GPUs", kind=Kind("ID,MiB,...")),
    ignored("-nkvo --no-kv-offload", NO_GPU, "KV cache in host memory"),
    ignored(
        "-op --offload-policy",
        NO_GPU,
        "operations whose large batches may go to the GPU",
        kind=Kind("OP,0|1,...", values.to_offload_policy, many=True),
    ),
    ignored("-no-ooae --no-offload-only-active-experts", NO_GPU, "copy all experts, not only those selected"),
    ignored("-mea --max-extra-alloc", NO_GPU, "extra allocation per GPU", kind=Kind("MiB")),
    ignored("-cuda --cuda-params", NO_GPU, "parameters of the CUDA backend", kind=Kind("K=V,...")),
    ignored("-smgs --split-mode-graph-scheduling", NO_GPU, "scheduling of graph split mode"),
    ignored("-smf16 --split-mode-f16", NO_GPU, "exchange f16 in graph split mode"),
    ignored("-smf32 --split-mode-f32", NO_GPU, "exchange f32 in graph split mode"),
    ignored("-grt --graph-reduce-type", NO_GPU, "type of exchanged data in graph split mode", kind=Kind("TYPE")),
    ignored("-gap --graph-attn-precision", NO_GPU, "attention precision in graph split mode", kind=Kind("TYPE")),
    ignored("-sas --scheduler-async", NO_GPU, "asynchronous evaluation of graph parts"),
    ignored("--rpc", "remote backends are not supported", "remote backends", kind=Kind("HOST:PORT,...")),
)
