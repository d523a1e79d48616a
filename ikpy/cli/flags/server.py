"""Options of the HTTP server."""

from ikpy.cli import values
from ikpy.cli.options import FLAG, FLOAT, INT, OFF, PATH, SWITCH, TEXT, Kind, always, ignored, option, refused

S = "S"
NO_HISTORY = "chat history is not stored"
NO_MEDIA = "images and audio are not supported"

ROWS = (
    option("--host", Kind("ADDRESS"), "server.host", "address to listen on", S, env="LLAMA_ARG_HOST"),
    option("--port", Kind("N", values.bounded(0, 65535)), "server.port", "port", S, env="LLAMA_ARG_PORT"),
    option("--path", PATH, "server.path", "directory of static files instead of the built-in page", S),
    option(
        "--webui",
        Kind("none|auto|llamacpp", values.choice("none", "auto", "llamacpp")),
        "server.webui",
        "built-in page",
        S,
    ),
    option("--no-webui", Kind(const="none"), "server.webui", "no built-in page", S),
    option("--webui-mcp-proxy --ui-mcp-proxy", FLAG, "server.webui_mcp_proxy", "route /cors-proxy", S),
    option("--api-key", Kind("KEY", many=True), "server.api_keys", "key clients must send. Repeatable", S),
    option(
        "--api-key-file",
        Kind("FILE", values.to_file_lines, many=True),
        "server.api_keys",
        "file with one key per line",
        S,
    ),
    option("--ssl-key-file", PATH, "server.ssl_key_file", "PEM key for HTTPS", S),
    option("--ssl-cert-file", PATH, "server.ssl_cert_file", "PEM certificate for HTTPS", S),
    option("-to --timeout", INT, "server.timeout", "socket timeout in seconds", S),
    option("--threads-http", INT, "server.threads_http", "HTTP workers", S, env="LLAMA_ARG_THREADS_HTTP"),
    option("-spf --system-prompt-file", PATH, "server.system_prompt_file", "prefix shared by all slots", S),
    option("--log-format", Kind("text|json", values.choice("text", "json")), "server.log_format", "log lines", S),
    option("--metrics", FLAG, "server.metrics", "route /metrics", S, env="LLAMA_ARG_ENDPOINT_METRICS"),
    option("--slots", FLAG, "server.slots", "route /slots", S, env="LLAMA_ARG_ENDPOINT_SLOTS"),
    option("--no-slots", OFF, "server.slots", "no route /slots", S),
    option("--slot-save-path", PATH, "server.slot_save_path", "directory of slot files", S),
    always("--send-done", "[DONE] at the end of streams", S),
    refused("--sql-save-file", NO_HISTORY, "chat history file", S, PATH),
    ignored("--sqlite-zstd-ext-file", NO_HISTORY, "compression extension of the history", S, PATH),
    ignored("--embd-normalize", "used by other programs only", "normalization of embeddings", kind=INT),
    ignored("--embd-output-format", "used by other programs only", "format of embeddings", kind=TEXT),
    ignored("--embd-separator", "used by other programs only", "separator of texts", kind=TEXT),
)

CACHE_ROWS = (
    option(
        "-cb --cont-batching", FLAG, "server.cont_batching", "continuous batching", S, env="LLAMA_ARG_CONT_BATCHING"
    ),
    option("-nocb --no-cont-batching", OFF, "server.cont_batching", "no continuous batching", S),
    option(
        "-sps --slot-prompt-similarity",
        FLOAT,
        "server.slot_prompt_similarity",
        "share of the prompt a slot must have in common to be chosen",
        S,
    ),
    option("--context-shift", SWITCH, "server.context_shift", "drop old tokens when the context is full", "SC"),
    option("--no-context-shift", OFF, "server.context_shift", "stop when the context is full", "SC"),
    option("-cram --cache-ram", Kind("MiB", values.to_int), "server.cache_ram", "prompt cache in memory", S),
    option("-crs --cache-ram-similarity", FLOAT, "server.cache_ram_similarity", "least similarity of a hit", S),
    option("-cram-n-min --cache-ram-n-min", INT, "server.cache_ram_n_min", "least tokens to keep", S),
    option("-ctx-ckpt --ctx-checkpoints", INT, "server.ctx_checkpoints", "context checkpoints per slot", S),
    option("-ctx-ckpt-i --ctx-checkpoints-interval", INT, "server.ctx_checkpoints_interval", "tokens between them", S),
    option("-ctx-ckpt-t --ctx-checkpoints-tolerance", INT, "server.ctx_checkpoints_tolerance", "tolerance", S),
    option("-ctx-ckpt-e --ctx-checkpoints-eviction", TEXT, "server.ctx_checkpoints_eviction", "which one goes", S),
)

CHAT_ROWS = (
    option(
        "--chat-template",
        TEXT,
        "prompt.chat_template",
        "name or text of the chat template; default: from the model",
        "SC",
        env="LLAMA_ARG_CHAT_TEMPLATE",
    ),
    option("--chat-template-file", PATH, "prompt.chat_template_file", "file with the chat template", "SC"),
    option(
        "--chat-template-kwargs",
        Kind("JSON", values.to_json_object),
        "prompt.chat_template_kwargs",
        "extra variables of the template",
        "SC",
    ),
    always("--jinja", "templates are rendered by the full engine", "SC"),
    option(
        "--reasoning-format",
        Kind("none|auto|...", values.choice("none", "auto", "deepseek", "deepseek-legacy")),
        "server.reasoning_format",
        "none, auto, deepseek or deepseek-legacy",
        S,
    ),
    option(
        "-rea --reasoning",
        Kind("on|off|auto", values.choice("on", "off", "auto")),
        "server.reasoning",
        "whether the model may reason first",
        S,
    ),
    option("--reasoning-budget", INT, "server.reasoning_budget", "most reasoning tokens; -1 = no limit", S),
    option("--reasoning-budget-message", TEXT, "server.reasoning_budget_message", "text before the end tag", S),
    option("--reasoning-tokens", TEXT, "server.reasoning_tokens", "tokens left out of slot similarity", S),
    option("--skip-chat-parsing", FLAG, "server.skip_chat_parsing", "give back the raw answer", S),
    option("--no-prefill-assistant", OFF, "server.prefill_assistant", "do not continue an assistant message", S),
    option("-ptcall --parallel-tool-calls", FLAG, "server.parallel_tool_calls", "several tool calls at once", S),
    ignored("--peg", "there is one parser", "parser of chat output", S),
)

MULTIMODAL_ROWS = (
    refused("--mmproj", NO_MEDIA, "projector file", kind=PATH),
    refused("--mmproj-url", NO_MEDIA, "URL of the projector file", kind=TEXT),
    ignored("--no-mmproj-offload", NO_MEDIA, "projector in host memory"),
    refused("--image --audio", NO_MEDIA, "media file", kind=PATH),
    ignored("--image-min-tokens", NO_MEDIA, "least tokens of an image", kind=INT),
    ignored("--image-max-tokens", NO_MEDIA, "most tokens of an image", kind=INT),
    ignored("--mtmd-kq-type", NO_MEDIA, "type of attention scores", kind=TEXT),
    ignored("-tm --threads-mtmd", NO_MEDIA, "threads for images", kind=INT),
)
