"""Options of speculative decoding. Drafts change the speed only, never the text."""

from ikpy.cli import drafter_values, placement_values, values
from ikpy.cli.options import COUNT, FLOAT, NO_GPU, PATH, TEXT, Kind, always, ignored, option, refused

SAME_VOCABULARY = "draft model and model must share their vocabulary; texts are not translated"
DRAFTED_ON_CPU = "drafts are the likeliest tokens, chosen on the CPU"
NO_SYNTHESIS = "drafts are taken as far as the model agrees; invented rates would make the text invalid"
ONE_DRAFT = "a draft is one sequence of tokens"
HEAD_AS_STORED = "the head's output matrix is used as it is in the file"
DRAFT_TYPE = Kind("TYPE", values.to_cache_type)


def setting(name: str, metavar: str = "N") -> Kind:
    """Kind of an option that sets one value of the drafters."""
    return Kind(metavar, drafter_values.draft_setting(name), many=True)


SETTINGS = "speculative.settings"
ROWS = (
    option("-md --model-draft --spec-draft-model", PATH, "speculative.model_draft", "GGUF file of a draft model", "SC"),
    option(
        "-hfd -hfrd --hf-repo-draft --spec-draft-hf",
        Kind("REPO"),
        "speculative.hf_repo",
        "draft model on the Hugging Face hub: user/repository or user/repository:QUANT",
        "SC",
        env="LLAMA_ARG_HFD_REPO LLAMA_ARG_SPEC_DRAFT_HF_REPO",
    ),
    option("-cd --ctx-size-draft", COUNT, "speculative.n_ctx", "context of the draft model; 0 = as the model's", "SC"),
    option(
        "-td --threads-draft --spec-draft-threads",
        Kind("N", values.to_threads),
        "speculative.n_threads",
        "threads of the draft model; default: as -t",
        "SC",
    ),
    option(
        "-tbd --threads-batch-draft --spec-draft-threads-batch",
        Kind("N", values.to_threads),
        "speculative.n_threads_batch",
        "prompt threads of the draft model; default: as -td",
        "SC",
    ),
    option(
        "-ctkd --cache-type-k-draft --spec-draft-type-k",
        DRAFT_TYPE,
        "speculative.type_k",
        "K cache type of the draft model",
        "SC",
        env="LLAMA_ARG_CACHE_TYPE_K_DRAFT LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_K",
    ),
    option(
        "-ctvd --cache-type-v-draft --spec-draft-type-v",
        DRAFT_TYPE,
        "speculative.type_v",
        "V cache type of the draft model",
        "SC",
        env="LLAMA_ARG_CACHE_TYPE_V_DRAFT LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_V",
    ),
    option(
        "--spec-type --spec-stage",
        Kind("TYPE[:K=V,..]", drafter_values.to_speculation, many=True),
        "speculative.types",
        "what drafts: none, ngram-simple, ngram-map-k, ngram-map-k4v, ngram-mod, ngram-cache, suffix, draft, "
        "mtp, eagle3, dflash, dspark. Repeatable; asked in the given order",
        "SC",
    ),
    option(
        "--spec-default",
        Kind(const=["ngram-mod:size_n=24,n_min=48,n_max=64"], many=True),
        "speculative.types",
        "drafts of ngram-mod; the same as --spec-type ngram-mod:size_n=24,n_min=48,n_max=64",
        "SC",
    ),
    option(
        "-draft --draft-params",
        Kind("K=V,..", drafter_values.to_draft_settings, many=True),
        SETTINGS,
        f"settings of the drafters: {', '.join(drafter_values.DRAFT_SETTINGS)}",
        "SC",
    ),
    option(
        "--draft --draft-max --draft-n --spec-draft-n-max --spec-ngram-mod-n-max",
        setting("n_max"),
        SETTINGS,
        "most tokens of a draft; 16",
        "SC",
    ),
    option(
        "--draft-min --draft-n-min --spec-draft-n-min --spec-ngram-mod-n-min",
        setting("n_min"),
        SETTINGS,
        "shorter drafts are dropped; 0",
        "SC",
    ),
    option(
        "--draft-p-min --spec-draft-p-min",
        setting("p_min", "P"),
        SETTINGS,
        "least probability of drafted tokens or suffix drafts; 0.8",
        "SC",
    ),
    option(
        "--spec-ngram-size-n --spec-ngram-simple-size-n --spec-ngram-map-k-size-n --spec-ngram-map-k4v-size-n "
        "--spec-ngram-mod-n-match",
        setting("size_n"),
        SETTINGS,
        "length of the n-gram that is looked up, in all drafters; 12",
        "SC",
    ),
    option(
        "--spec-ngram-size-m --spec-ngram-simple-size-m --spec-ngram-map-k-size-m --spec-ngram-map-k4v-size-m",
        setting("size_m"),
        SETTINGS,
        "most tokens of an n-gram draft; 48",
        "SC",
    ),
    option(
        "--spec-ngram-min-hits --spec-ngram-simple-min-hits --spec-ngram-map-k-min-hits --spec-ngram-map-k4v-min-hits",
        setting("min_hits"),
        SETTINGS,
        "occurrences an n-gram needs; 1",
        "SC",
    ),
    option("--suffix-pattern-len", setting("pattern_len"), SETTINGS, "shortest suffix that is matched; 3", "SC"),
    option("--suffix-max-depth", setting("max_depth"), SETTINGS, "longest suffix that is matched; 64", "SC"),
    option(
        "--suffix-corpus", PATH, "speculative.suffix_corpus", "text file known to suffix drafts from the start", "SC"
    ),
    option(
        "-lcs --lookup-cache-static",
        PATH,
        "speculative.lookup_static",
        "n-gram statistics of a corpus, read by ngram-cache",
        "SC",
    ),
    option(
        "-lcd --lookup-cache-dynamic -lookup-cache-dynamic",
        PATH,
        "speculative.lookup_dynamic",
        "n-gram statistics of earlier texts, read and written by ngram-cache",
        "SC",
    ),
    ignored("--draft-p-split --spec-draft-p-split", ONE_DRAFT, "probability from which a draft divides", kind=FLOAT),
    option(
        "-ngld --gpu-layers-draft --n-gpu-layers-draft --spec-draft-ngl",
        Kind("N", placement_values.to_gpu_layers),
        "speculative.n_gpu_layers",
        "layers of the draft model on the GPUs, as -ngl; default: all, or none with -ngl 0",
        "SC",
        env="LLAMA_ARG_N_GPU_LAYERS_DRAFT",
        reason=NO_GPU,
        quiet="0",
    ),
    option(
        "-otd --override-tensor-draft --spec-draft-override-tensor",
        Kind("REGEX=BUFFER,...", placement_values.to_tensor_override, many=True),
        "speculative.tensor_overrides",
        "buffer of tensors of the draft model, as -ot. Repeatable",
        "SC",
    ),
    option(
        "-cmoed --cpu-moe-draft --spec-draft-cpu-moe",
        Kind(const=999),
        "speculative.n_cpu_moe",
        "all expert tensors of the draft model in host memory",
        "SC",
        reason=NO_GPU,
    ),
    option(
        "-ncmoed --n-cpu-moe-draft --spec-draft-n-cpu-moe --spec-draft-ncmoe",
        COUNT,
        "speculative.n_cpu_moe",
        "expert tensors of its last N layers in host memory",
        "SC",
        reason=NO_GPU,
        quiet="0",
    ),
    refused("--spec-synth-len", NO_SYNTHESIS, "mean number of tokens taken per draft", "SC", FLOAT),
    refused("--spec-synth-rates", NO_SYNTHESIS, "share of drafts taken at each position", "SC", Kind("P,P,...")),
    ignored(
        "--spec-draft-sampling",
        DRAFTED_ON_CPU,
        "how drafted tokens are drawn",
        kind=Kind("greedy|probabilistic"),
        quiet="greedy",
    ),
    ignored("--spec-draft-backend-sampling", DRAFTED_ON_CPU, "drafted tokens are drawn on the GPU"),
    always("--no-spec-draft-backend-sampling", "drafted tokens are drawn on the CPU"),
    ignored("--spec-replace", SAME_VOCABULARY, "replacement of text between the models", kind=Kind("TARGET DRAFT")),
    option(
        "-mtp --multi-token-prediction",
        Kind(const=["mtp"], many=True),
        "speculative.types",
        "drafts from the model's own prediction head; the same as --spec-type mtp",
        "SC",
    ),
    always("-no-mtp --no-multi-token-prediction", "no drafts from prediction heads unless they are asked for", "SC"),
    ignored("-mtprot --mtp-requantize-output-tensor", HEAD_AS_STORED, "type of the head's output matrix", kind=TEXT),
    ignored(
        "--spec-ckpt-mode --recurrent-ckpt-mode",
        "copies of the states behind all guesses are kept",
        "how recurrent layers come back from wrong guesses",
        kind=TEXT,
    ),
    ignored("--spec-autotune", "the settings are used as given", "choice of settings while running"),
)
