"""Options of loading and of host memory."""

from ikpy.cli.options import BARE_OR_BIT, FLAG, OFF, SWITCH_OR_AUTO, Kind, always, ignored, option
from ikpy.cli.values import bounded, choice, to_numa

PAGE_CACHE = "files are read through the page cache"
MAX_READERS = 64
LOAD_MODES = ("auto", "none", "mmap", "mlock", "mmap+mlock", "dio")

ROWS = (
    option("--mmap", FLAG, "model.use_mmap", "map the file"),
    option("--no-mmap", OFF, "model.use_mmap", "read the file into memory (huge pages) instead of mapping it"),
    option(
        "-thp --transparent-huge-pages",
        FLAG,
        "model.huge_pages",
        "read the file into huge pages: reserved ones if enough are free, else transparent ones",
    ),
    option("--mlock", FLAG, "model.use_mlock", "lock the pages of the model in memory", env="LLAMA_ARG_MLOCK"),
    option(
        "-rtr --run-time-repack",
        BARE_OR_BIT,
        "model.repack",
        "rearrange weights into their row-interleaved types while loading (F16 and BF16 stay as they are)",
    ),
    option("--repack", FLAG, "model.repack", "the same as -rtr"),
    option("-nr --no-repack", OFF, "model.repack", "use the weights as they are in the file"),
    option(
        "-lm --load-mode",
        Kind("|".join(LOAD_MODES), choice(*LOAD_MODES)),
        "model.load_mode",
        "none and dio are --no-mmap, mlock is --no-mmap --mlock, mmap+mlock is --mlock",
    ),
    option(
        "-lzm --lazy-mode",
        Kind("on|off|auto", choice("on", "off", "auto")),
        "model.lazy_mode",
        "on: mapped weights are read when they are needed; else in the background too, if memory holds them",
    ),
    ignored("-dio --direct-io", PAGE_CACHE, "read past the page cache"),
    always("-ndio --no-direct-io", "reading through the page cache"),
    ignored("--no-host", "weights of the CPU are never in a GPU's host buffers", "no host buffers"),
    option("--check-tensors", FLAG, "model.check_tensors", "look for invalid values in the tensor data"),
    option(
        "-dr --dry-run",
        FLAG,
        "model.dry_run",
        "print everything that would be allocated, per device and kind, read no tensor data, and stop",
    ),
    ignored("-vq --validate-quants", "--check-tensors looks at every value", "check quantized blocks while loading"),
    option(
        "--numa --numactl",
        Kind("distribute|isolate|numactl", to_numa),
        "model.numa",
        "machines with several memory nodes: threads in turn on all nodes, on the starting node, or as inherited",
    ),
    option(
        "--defer-experts",
        FLAG,
        "model.defer_experts",
        "read experts of the mapped file when they are needed, not in the background; no warm-up",
    ),
    option(
        "--prefetch-experts",
        SWITCH_OR_AUTO,
        "model.prefetch_experts",
        "read the chosen experts of the mapped file ahead of their products (auto: if it exceeds the memory)",
    ),
    option(
        "--prefetch-experts-threads",
        Kind("N", bounded(1, MAX_READERS)),
        "model.prefetch_threads",
        f"threads of --prefetch-experts, up to {MAX_READERS}",
    ),
    always("-kvu --kv-unified", "one cache for all sequences"),
    ignored("-no-kvu --no-kv-unified", "the cache is always unified", "separate caches per sequence"),
)
