"""Options of loading and of host memory."""

from ikpy.cli.options import BARE_OR_BIT, FLAG, INT, OFF, TEXT, Kind, ignored, option
from ikpy.cli.values import to_numa

NOT_YET = "not supported yet"

ROWS = (
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
    option("--check-tensors", FLAG, "model.check_tensors", "look for invalid values in the tensor data"),
    option(
        "-dr --dry-run",
        FLAG,
        "model.dry_run",
        "print everything that would be allocated, per device and kind, read no tensor data, and stop",
    ),
    ignored("-vq --validate-quants", NOT_YET, "check quantized blocks while loading"),
    option(
        "--numa --numactl",
        Kind("distribute|isolate|numactl", to_numa),
        "model.numa",
        "machines with several memory nodes: threads in turn on all nodes, on the starting node, or as inherited",
    ),
    ignored("--defer-experts", "pages of the mapping are read on first use anyway", "no early read of expert pages"),
    ignored("--prefetch-experts", NOT_YET, "read expert pages ahead"),
    ignored("--prefetch-experts-threads", NOT_YET, "threads that read expert pages ahead", kind=INT),
    ignored("--prio", "thread priorities are left to the system", "thread priority", kind=INT),
    ignored("--poll", "threads always wait actively for a short time", "polling level", kind=INT),
    ignored("-C --cpu-mask", "set the CPU mask with taskset", "CPUs to run on", kind=TEXT),
    ignored("--no-perf", "timings cost nothing", "no timings"),
    ignored("--no-kv-unified", "the cache is always unified", "separate caches per sequence"),
)
