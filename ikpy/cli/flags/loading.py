"""Options of loading and of host memory."""

from ikpy.cli.options import BARE_OR_BIT, FLAG, INT, TEXT, ignored, option

NOT_YET = "not supported yet"

ROWS = (
    ignored("--no-mmap", "the file is always mapped", "read the file into memory instead of mapping it"),
    ignored("--mlock", NOT_YET, "lock the pages of the model in memory", env="LLAMA_ARG_MLOCK"),
    ignored(
        "-rtr --run-time-repack",
        "kernels read every type in place, nothing needs repacking",
        "rearrange weights into interleaved types after loading",
        kind=BARE_OR_BIT,
        quiet="0",
    ),
    option("--check-tensors", FLAG, "model.check_tensors", "look for invalid values in the tensor data"),
    option(
        "-dr --dry-run",
        FLAG,
        "model.dry_run",
        "read the metadata, print the summary and the sizes, read no tensor data, and stop",
    ),
    ignored("-vq --validate-quants", NOT_YET, "check quantized blocks while loading"),
    ignored("-thp --transparent-huge-pages", NOT_YET, "huge pages for the weights"),
    ignored("--numa --numactl", NOT_YET, "placement of threads on NUMA nodes", kind=TEXT),
    ignored("--defer-experts", "pages of the mapping are read on first use anyway", "no early read of expert pages"),
    ignored("--prefetch-experts", NOT_YET, "read expert pages ahead"),
    ignored("--prefetch-experts-threads", NOT_YET, "threads that read expert pages ahead", kind=INT),
    ignored("--prio", "thread priorities are left to the system", "thread priority", kind=INT),
    ignored("--poll", "threads always wait actively for a short time", "polling level", kind=INT),
    ignored("-C --cpu-mask", "set the CPU mask with taskset", "CPUs to run on", kind=TEXT),
    ignored("--no-perf", "timings cost nothing", "no timings"),
    ignored("--no-kv-unified", "the cache is always unified", "separate caches per sequence"),
)
