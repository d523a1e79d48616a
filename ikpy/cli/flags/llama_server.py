"""Options of today's llama-server that came after ik_llama.cpp's: used where something stands for them, else with one
line that says why not."""

from ikpy.cli.flags.server import S
from ikpy.cli.options import FLAG, INT, OFF, PATH, TEXT, Kind, always, ignored, option, refused

NO_TOOLS = "clients call their tools themselves"
NO_SPEECH = "speech is not supported"
NO_SHORTCUT = "name the model with -hf"
ALL_CORS = "what pages may do is set by --cors alone"
PER_SLOT = "-c is the whole context, divided evenly by -np"

ROWS = (
    option(
        "--reasoning-effort",
        TEXT,
        "server.reasoning_effort",
        "reasoning_effort of the template unless a request sets it; none = no reasoning, default = the template's own",
        S,
    ),
    always("--reasoning-preserve", "templates see the reasoning of all messages", S),
    ignored("--no-reasoning-preserve", "what is kept is the template's choice", "reasoning of old messages goes", S),
    option("--no-skip-chat-parsing", OFF, "server.skip_chat_parsing", "read reasoning and calls in answers", S),
    option("--log-jsonl", Kind(const="json"), "server.log_format", "log lines as JSON", S),
    option("--no-log-jsonl", Kind(const="text"), "server.log_format", "log lines as text", S),
    ignored("--log-prompts-dir", "texts are not logged", "folder of prompts", S, PATH),
    ignored("--tags", "routes do not show them", "words about the model", S, TEXT),
    option(
        "--sse-ping-interval",
        INT,
        "server.sse_ping_interval",
        "seconds without an event after which a stream gets a line that clients pass over; 0 and below = never",
        S,
    ),
    option("--reuse-port", FLAG, "server.reuse_port", "other servers with this option may listen on the port, too", S),
    ignored("--cors-methods --cors-headers", ALL_CORS, "what pages of other origins may send", S, TEXT),
    ignored("--cors-credentials --no-cors-credentials", ALL_CORS, "credentials of pages of other origins", S),
    ignored("--no-cache-idle-slots", "--cache-ram 0 saves no texts", "texts of idle slots stay there", S),
    refused("--kv-unified-per-slot", PER_SLOT, "tokens of each slot", S, INT),
    refused("-ag --agent", NO_TOOLS, "tools and proxy of the page", S),
    always("-no-ag --no-agent", "no tools and no proxy", S),
    refused("--mcp-servers-config", NO_TOOLS, "file of tool servers", S, PATH),
    refused("--mcp-servers-json", NO_TOOLS, "tool servers", S, TEXT),
    ignored("--tools-runtime", NO_TOOLS, "where tools run", S, TEXT),
    refused(
        "--embd-gemma-default --fim-qwen-1.5b-default --fim-qwen-3b-default --fim-qwen-7b-default --fim-qwen-7b-spec "
        "--fim-qwen-14b-spec --fim-qwen-30b-default --gpt-oss-20b-default --gpt-oss-120b-default "
        "--vision-gemma-4b-default --vision-gemma-12b-default --embd-bge-small-en-default --embd-e5-small-en-default "
        "--embd-gte-small-default",
        NO_SHORTCUT,
        "a certain model of the hub",
        S,
    ),
    refused("-mv --model-vocoder -hfv -hfrv --hf-repo-v -hffv --hf-file-v", NO_SPEECH, "model that speaks", S, PATH),
    ignored("--tts-use-guide-tokens", NO_SPEECH, "speech of known words", S),
    refused("-cl --cache-list", "the server finds them by their names, see -hf", "list of downloaded models", S),
)
