"""Options that name the model."""

from ikpy.cli import values
from ikpy.cli.options import FLAG, NONEMPTY_PATH, TEXT, Kind, option, refused

ROWS = (
    option(
        "-m --model",
        NONEMPTY_PATH,
        "model.path",
        "GGUF file; of a split model the first shard. Without it the bundled tiny-mla-moe is used",
        env="LLAMA_ARG_MODEL",
    ),
    option("-mu --model-url", TEXT, "model.url", "URL of the model file, downloaded once", env="LLAMA_ARG_MODEL_URL"),
    option(
        "-hf -hfr --hf-repo",
        Kind("REPO"),
        "model.hf_repo",
        "model on the Hugging Face hub: user/repository or user/repository:QUANT; downloaded once",
        env="LLAMA_ARG_HF_REPO",
    ),
    option("-hff --hf-file", TEXT, "model.hf_file", "file in the hub repository", env="LLAMA_ARG_HF_FILE"),
    option("-hft --hf-token", TEXT, "model.hf_token", "access token of the hub", env="HF_TOKEN"),
    option("--offline", FLAG, "model.offline", "take -hf and -mu from the cache only", env="LLAMA_ARG_OFFLINE"),
    refused("--docker-repo", "give the file with -m, -mu or -hf", "model on Docker Hub", kind=Kind("REPO")),
    option("-a --alias", TEXT, "model.alias", "name reported by the API", "S", env="LLAMA_ARG_MODEL_ALIAS"),
    option(
        "-okv --override-kv",
        Kind("KEY=TYPE:VALUE,...", values.to_kv_overrides, many=True),
        "model.kv_overrides",
        "replace a metadata value; TYPE is int, float, bool or str. Repeatable",
    ),
    option(
        "--lora",
        Kind("FILE", values.to_file_unscaled, many=True),
        "model.lora",
        "LoRA adapter (GGUF), applied while running. Repeatable",
    ),
    option(
        "--lora-scaled",
        Kind("FILE SCALE", values.to_file_scaled, many=True),
        "model.lora",
        "LoRA adapter with a scale. Repeatable",
    ),
    option(
        "--lora-init-without-apply",
        FLAG,
        "model.lora_off",
        "start with all adapters at scale 0; the server's POST /lora-adapters changes that",
    ),
    option(
        "--control-vector",
        Kind("FILE", values.to_file_unscaled, many=True),
        "model.control_vectors",
        "control vector (GGUF) added to the residual stream. Repeatable, the sum is added",
    ),
    option(
        "--control-vector-scaled",
        Kind("FILE SCALE", values.to_file_scaled, many=True),
        "model.control_vectors",
        "control vector with a scale. Repeatable",
    ),
    option(
        "--control-vector-layer-range",
        Kind("START END", values.to_layer_range),
        "model.control_layers",
        "layers that get the control vectors, both included; default: all",
    ),
)
