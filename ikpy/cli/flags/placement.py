"""Options that place tensors and work on devices."""

from ikpy.cli import placement_values, values
from ikpy.cli.options import COUNT, FLAG, INT, NO_GPU, OFF, SWITCH, Kind, always, ignored, option

SPLIT_MODES = ("none", "layer", "row", "attn", "graph", "tensor")

ASYNCHRONOUS = "copies and kernels are always asynchronous"
GRAPH_SPLIT = "in graph mode all devices share every layer and exchange f32"
WEIGHT = Kind("A,B,...", placement_values.to_tensor_split)

ROWS = (
    option(
        "-ngl --gpu-layers --n-gpu-layers",
        Kind("N", placement_values.to_gpu_layers),
        "model.n_gpu_layers",
        "layers kept on the GPU, the last ones first; above their number also the output matrix; -1, auto or all = all",
        env="LLAMA_ARG_N_GPU_LAYERS",
        reason=NO_GPU,
        quiet="0",
    ),
    option(
        "-sm --split-mode",
        Kind("|".join(SPLIT_MODES), values.choice(*SPLIT_MODES)),
        "model.split_mode",
        "how a model is divided among GPUs: whole layers, or with graph the attention and networks of every layer, the "
        "cache and the output matrix; row, attn and tensor are read as layer",
        reason=NO_GPU,
    ),
    option(
        "-mg --main-gpu",
        COUNT,
        "model.main_gpu",
        "device that holds everything with -sm none, and encodes pictures",
        reason=NO_GPU,
    ),
    option(
        "-ts --tensor-split",
        WEIGHT,
        "model.tensor_split",
        "share of the layers of each GPU, and of divided networks; default: by free memory",
        reason=NO_GPU,
    ),
    ignored("--max-gpu", GRAPH_SPLIT, "GPUs per layer in graph mode", kind=INT),
    option(
        "-dev --device",
        Kind("CUDA0,...|none", placement_values.to_devices),
        "model.devices",
        "devices to use; default: all",
        reason=NO_GPU,
        quiet="none",
    ),
    option(
        "-devd --device-draft --spec-draft-device",
        Kind("CUDA0,...|none", placement_values.to_devices),
        "speculative.devices",
        "devices of the draft model; default: as -dev",
        "SC",
        reason=NO_GPU,
        quiet="none",
    ),
    option(
        "-ot --override-tensor",
        Kind("REGEX=BUFFER,...", placement_values.to_tensor_override, many=True),
        "model.tensor_overrides",
        "buffer of the tensors whose name matches; first match wins. Repeatable",
    ),
    option("-cmoe --cpu-moe", Kind(const=999), "model.n_cpu_moe", "all expert tensors in host memory", reason=NO_GPU),
    option(
        "-ncmoe --n-cpu-moe",
        COUNT,
        "model.n_cpu_moe",
        "expert tensors of the last N layers in host memory",
        reason=NO_GPU,
        quiet="0",
    ),
    option(
        "-ncffn --n-cpu-ffn",
        Kind("N", placement_values.to_cpu_ffn, many=True),
        "model.tensor_overrides",
        "dense feed-forward tensors of the first N layers in host memory; a rule of -ot for them",
        reason=NO_GPU,
        quiet="0",
    ),
    ignored(
        "--moe-cache-mib",
        "experts in host memory run there, or are copied for one batch",
        "memory for experts kept on the GPUs",
        kind=INT,
        quiet="0",
    ),
    option(
        "-fit --fit",
        SWITCH,
        "model.fit",
        "keep as many experts, then layers, in host memory as it takes to fit the GPUs",
        reason=NO_GPU,
        quiet="off 0 false",
    ),
    option(
        "--fit-margin",
        Kind("MiB", values.bounded(0)),
        "model.fit_margin",
        "memory that --fit leaves free on each GPU",
        reason=NO_GPU,
    ),
    option(
        "-fitt --fit-target",
        Kind("MiB,MiB,...", placement_values.to_fit_targets),
        "model.fit_targets",
        "memory that --fit leaves free on each GPU; one number is for all",
        reason=NO_GPU,
    ),
    ignored("-fitc --fit-ctx", "the context keeps its size", "least context that --fit may choose", kind=INT),
    option(
        "-gfm --gpu-fit-margin",
        Kind("ID,MiB,...", placement_values.to_fit_margins),
        "model.fit_margins",
        "memory that --fit leaves free on single GPUs",
        reason=NO_GPU,
    ),
    option("-kvo --kv-offload", FLAG, "model.kv_offload", "KV cache with its layers on the GPUs", reason=NO_GPU),
    option("-nkvo --no-kv-offload", OFF, "model.kv_offload", "KV cache and attention on the CPU", reason=NO_GPU),
    option(
        "-op --offload-policy",
        Kind("OP,0|1,...", placement_values.to_offload_policy, many=True),
        "model.offload_policy",
        "operations whose large batches with weights in host memory may run on the GPU",
        reason=NO_GPU,
    ),
    always("--op-offload", "large batches with weights in host memory run on the GPU, unless -op says otherwise"),
    option(
        "-nopo --no-op-offload",
        Kind(const=[(-1, False)], many=True),
        "model.offload_policy",
        "products with weights in host memory stay on the CPU; the same as -op -1,0",
        reason=NO_GPU,
    ),
    option(
        "-no-ooae --no-offload-only-active-experts",
        OFF,
        "model.only_active_experts",
        "copy all experts of a large batch to the GPU, not only those selected",
        reason=NO_GPU,
    ),
    ignored("-mea --max-extra-alloc", "buffers are planned exactly", "extra allocation per GPU", kind=Kind("MiB")),
    option(
        "-cuda --cuda-params",
        Kind("K=V,...", placement_values.to_cuda_params),
        "model.cuda_params",
        "graphs=0|1: CUDA graphs; offload-batch-size=N: smallest batch for -op; bf16-batch-size=N: smallest batch "
        "for bf16 tensor cores, 0 = never; wgmma=0|1: the kernels of sm_90. Other keys have no effect",
        reason=NO_GPU,
    ),
    ignored("-smgs --split-mode-graph-scheduling", GRAPH_SPLIT, "scheduling of graph split mode"),
    ignored("-smf16 --split-mode-f16", GRAPH_SPLIT, "exchange f16 in graph split mode"),
    ignored("-smf32 --split-mode-f32", GRAPH_SPLIT, "exchange f32 in graph split mode"),
    ignored("-grt --graph-reduce-type", GRAPH_SPLIT, "type of exchanged data in graph split mode", kind=Kind("TYPE")),
    ignored("-gap --graph-attn-precision", GRAPH_SPLIT, "attention precision in graph split mode", kind=Kind("TYPE")),
    ignored("-sas --scheduler-async", ASYNCHRONOUS, "asynchronous evaluation"),
    option(
        "--rpc",
        Kind("HOST:PORT,...", placement_values.to_hosts),
        "model.rpc",
        "machines that run `ikpy rpc-server`: further devices, RPC[HOST:PORT], behind the GPUs",
    ),
)
