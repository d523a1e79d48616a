"""Options that name the model."""

from ikpy.cli.options import PATH, TEXT, Kind, ignored, option, refused
from ikpy.cli.values import to_kv_override

NO_ADAPTERS = "adapters are not supported; merge them into the model file"
NO_CONTROL = "control vectors are not supported"

ROWS = (
    option(
        "-m --model",
        PATH,
        "model.path",
        "GGUF file; of a split model the first shard. Without it the bundled tiny-mla-moe is used",
        env="LLAMA_ARG_MODEL",
    ),
    option("-mu --model-url", TEXT, "model.url", "URL to load the model from", env="LLAMA_ARG_MODEL_URL"),
    option("-hfr --hf-repo", TEXT, "model.hf_repo", "repository on the hub", env="LLAMA_ARG_HF_REPO"),
    option("-hff --hf-file", TEXT, "model.hf_file", "file in the hub repository", env="LLAMA_ARG_HF_FILE"),
    option("-hft --hf-token", TEXT, "model.hf_token", "access token of the hub", env="HF_TOKEN"),
    option("-a --alias", TEXT, "model.alias", "name reported by the API", "S", env="LLAMA_ARG_MODEL_ALIAS"),
    option(
        "-okv --override-kv",
        Kind("KEY=TYPE:VALUE", to_kv_override, many=True),
        "model.kv_overrides",
        "replace a metadata value; TYPE is int, float, bool or str. Repeatable",
    ),
    refused("--lora", NO_ADAPTERS, "LoRA adapter", kind=PATH),
    refused("--lora-scaled", NO_ADAPTERS, "LoRA adapter with a scale", kind=Kind("FILE SCALE")),
    ignored("--lora-init-without-apply", NO_ADAPTERS, "load adapters without applying them", "S"),
    refused("--control-vector", NO_CONTROL, "control vector", kind=PATH),
    refused("--control-vector-scaled", NO_CONTROL, "control vector with a scale", kind=Kind("FILE SCALE")),
    ignored("--control-vector-layer-range", NO_CONTROL, "layers of the control vector", kind=Kind("START END")),
)
