"""Options of the context: sizes, threads, attention, experts, RoPE."""

from ikpy.cli import values
from ikpy.cli.options import BARE_OR_BIT, FLAG, FLOAT, INT, NO_GPU, OFF, SWITCH, Kind, always, ignored, option
from ikpy.quants import registry

THREADS = Kind("N", values.to_threads)
SIZE = Kind("N", values.bounded(0))
POSITIVE = Kind("N", values.bounded(1))
CACHE_TYPE = Kind("TYPE", values.to_cache_type)
LAYER_TYPE = Kind("TYPE,N", values.to_layer_type)
FUSION = "the graph compiler always fuses"

ROWS = (
    option(
        "-c --ctx-size",
        SIZE,
        "context.n_ctx",
        "context size in tokens, padded to a multiple of 256 (32 without flash attention); 0 = training context, in "
        "batched-bench what its tests need",
        env="LLAMA_ARG_CTX_SIZE",
    ),
    option(
        "-b --batch-size",
        POSITIVE,
        "context.n_batch",
        "logical batch: most tokens of one decode call",
        env="LLAMA_ARG_BATCH",
    ),
    option(
        "-ub --ubatch-size",
        SIZE,
        "context.n_ubatch",
        "physical batch: most tokens computed at once; 0 = the logical batch",
        env="LLAMA_ARG_UBATCH",
    ),
    option(
        "-np --parallel",
        Kind("N", values.to_parallel),
        "context.n_parallel",
        "sequences decoded together; -1 = 1",
        "PS",
        env="LLAMA_ARG_N_PARALLEL",
    ),
    option(
        "-t --threads",
        THREADS,
        "context.n_threads",
        "threads for generation; 0 or less = hardware threads; default: physical cores within a container's quota",
        env="LLAMA_ARG_THREADS",
    ),
    option("-tb --threads-batch", THREADS, "context.n_threads_batch", "threads for prompts; default: as -t"),
    option(
        "-s --seed",
        Kind("N", values.to_seed),
        "sampling.seed",
        "seed of random numbers; negative = random. Benchmarks have a fixed one",
        "SC",
    ),
    option("-s --seed", Kind("N", values.to_seed), "sampling.seed", "shown in the log; nothing here is random", "PI"),
    option("--warmup", FLAG, "context.warmup", "warm-up decode, and a trial of the GPU kernels while loading", "WB"),
    option("--warmup", FLAG, "context.warmup", "trial of the GPU kernels while loading", "PISC", reason=NO_GPU),
    option("--no-warmup", OFF, "context.warmup", "no warm-up decode, and no trial of the GPU kernels"),
    ignored(
        "-dt --defrag-thold",
        "cells of a sequence may lie anywhere in the cache",
        "KV cache defragmentation threshold",
        "S",
        FLOAT,
        env="LLAMA_ARG_DEFRAG_THOLD",
    ),
    option(
        "--pooling",
        Kind("none|mean|cls|last|rank", values.choice("none", "mean", "cls", "last", "rank")),
        "context.pooling",
        "pooling of embeddings; default: from the model",
        "S",
    ),
    option(
        "--attention",
        Kind("causal|non-causal", values.choice("causal", "non-causal")),
        "context.attention",
        "attention mask; default: from the model",
        "S",
    ),
    option("-gan --grp-attn-n", Kind("N", values.to_group_size), "", "self-extend group size; only 1 (off)", "SC"),
    ignored("-gaw --grp-attn-w", "self-extend is not supported", "self-extend window", "SC", INT),
    ignored("-ns --sequences", "used by other programs only", "sequences to decode", kind=INT),
    ignored("-ps --p-split", "used by other programs only", "split probability", kind=FLOAT),
    ignored("-dkvc --dump-kv-cache", "there is no cache dump", "print the KV cache while running"),
    ignored("-wgt --worst-graph-tokens", "the compute buffer is planned exactly", "tokens to reserve for", kind=INT),
)

ATTENTION_ROWS = (
    option("-fa --flash-attn", SWITCH, "context.flash_attn", "flash attention", env="LLAMA_ARG_FLASH_ATTN"),
    option("-no-fa --no-flash-attn", OFF, "context.flash_attn", "no flash attention"),
    option(
        "-mla --mla-use --mla-attn",
        Kind("0..3", values.bounded(0, 3)),
        "context.mla",
        "how multi-head latent attention is computed and cached; no meaning for other models",
    ),
    option(
        "-amb --attention-max-batch --attn-max-batch",
        Kind("MiB", values.to_attention_batch),
        "context.attn_max_batch",
        "bound on the scratch of the attention scores; 0 = none",
    ),
    option(
        "-ctk --cache-type-k",
        CACHE_TYPE,
        "context.type_k",
        f"type of the K cache: {' '.join(registry.CACHE_TYPES)}",
        env="LLAMA_ARG_CACHE_TYPE_K",
    ),
    option(
        "-ctv --cache-type-v",
        CACHE_TYPE,
        "context.type_v",
        "type of the V cache; a quantized one needs flash attention",
        env="LLAMA_ARG_CACHE_TYPE_V",
    ),
    option(
        "-ctk-first --cache-type-k-first",
        LAYER_TYPE,
        "context.type_k_first",
        "another type of the K cache for the first N layers",
    ),
    option(
        "-ctk-last --cache-type-k-last",
        LAYER_TYPE,
        "context.type_k_last",
        "another type of the K cache for the last N layers",
    ),
    option(
        "-ctv-first --cache-type-v-first",
        LAYER_TYPE,
        "context.type_v_first",
        "another type of the V cache for the first N layers",
    ),
    option(
        "-ctv-last --cache-type-v-last",
        LAYER_TYPE,
        "context.type_v_last",
        "another type of the V cache for the last N layers",
    ),
    option(
        "-ictk --indexer-cache-type-k",
        CACHE_TYPE,
        "context.type_indexer",
        "type of the cached index keys of models with sparse attention",
    ),
    option(
        "-khad --k-cache-hadamard",
        FLAG,
        "context.k_hadamard",
        "Hadamard transform of keys before a quantized cache stores them",
        env="LLAMA_ARG_K_CACHE_HADAMARD",
    ),
    option(
        "-vhad --v-cache-hadamard",
        FLAG,
        "context.v_hadamard",
        "Hadamard transform of values before a quantized cache stores them; no meaning for cached latents",
        env="LLAMA_ARG_V_CACHE_HADAMARD",
    ),
    always("-fmoe --fused-moe", "fused up and gate product of experts", kind=BARE_OR_BIT),
    ignored("-no-fmoe --no-fused-moe", FUSION, "separate up and gate products of experts"),
    option(
        "-ser --smart-expert-reduction",
        Kind("K,t", values.to_expert_reduction),
        "context.smart_expert_reduction",
        "keep K experts, drop others whose probability is below t times the largest; K < 0 or t = 0 is off",
    ),
    option(
        "-ger --grouped-expert-routing",
        FLAG,
        "context.grouped_experts",
        "choose experts from the best groups only, on models that define groups",
    ),
    ignored("-no-fug --no-fused-up-gate", FUSION, "no fused dense up and gate product"),
    ignored("-no-mmad --no-fused-mul-multiadd", FUSION, "no fused weighting and sum of experts"),
    always("-rcache --rope-cache", "rotation angles are computed once per batch"),
    always("-gr --graph-reuse", "reuse of compiled graphs"),
    ignored("-no-gr --no-graph-reuse", "compiled graphs are always reused", "no reuse of compiled graphs"),
    ignored("-mqkv --merge-qkv", "the file's tensors are used as they are", "merge Q, K, V weights at load"),
    ignored(
        "-muge --merge-up-gate-experts",
        "the file's tensors are used as they are",
        "merge up and gate expert tensors at load",
    ),
    always("-dsa --dsa", "sparse attention of models whose files have indexers; -dsatk 0 turns it off"),
    always("-fidx --fused-indexer-topk", "index scores and choice in one operation"),
    option(
        "-dsatk --dsa-top-k",
        Kind("N", values.bounded(-1)),
        "context.sparse_top_k",
        "cached tokens that indexers choose for a token to attend to; 0 = all, -1 = what the file says",
    ),
    ignored("-fdn --fused-delta-net", "the delta rule is one op for any number of tokens", "fused delta net", kind=INT),
    ignored("--swa-compress", "the window cache is not compressed", "compressed sliding-window cache"),
    option(
        "--swa-full",
        FLAG,
        "context.swa_full",
        "layers that attend to a window keep all tokens, so that a prompt can be reused from any place",
    ),
    option(
        "--rerank --reranking",
        FLAG,
        "context.reranking",
        "ranking of documents: the same as --embeddings --pooling rank",
        "S",
        env="LLAMA_ARG_RERANKING",
    ),
    option("--embedding --embeddings", FLAG, "context.embeddings", "embedding output", "S", env="LLAMA_ARG_EMBEDDINGS"),
)

ROPE_ROWS = (
    option(
        "--rope-scaling",
        Kind("none|linear|yarn", values.choice("none", "linear", "yarn")),
        "context.rope_scaling",
        "method of context extension; default: from the model",
        env="LLAMA_ARG_ROPE_SCALING_TYPE",
    ),
    option(
        "--rope-scale",
        Kind("F", values.to_rope_scale),
        "context.rope_freq_scale",
        "context extension factor: the frequency scale becomes 1/F; default: from the model",
    ),
    option("--rope-freq-base", FLOAT, "context.rope_freq_base", "base frequency; 0 = from the model"),
    option("--rope-freq-scale", FLOAT, "context.rope_freq_scale", "frequency scale; 0 = from the model"),
    option("--yarn-orig-ctx", SIZE, "context.yarn_orig_ctx", "original context of the model; 0 = from the model"),
    option("--yarn-ext-factor", FLOAT, "context.yarn_ext_factor", "YaRN extrapolation mix; negative = standard"),
    option("--yarn-attn-factor", FLOAT, "context.yarn_attn_factor", "YaRN magnitude; negative = standard"),
    option("--yarn-beta-fast", FLOAT, "context.yarn_beta_fast", "YaRN low correction; negative = standard"),
    option("--yarn-beta-slow", FLOAT, "context.yarn_beta_slow", "YaRN high correction; negative = standard"),
)
