"""Options of the sampler chain and of constraints on the output."""

from ikpy.cli import file_values, sampling_values
from ikpy.cli.options import COUNT_OR_ALL, FLAG, FLOAT, INT, PATH, TEXT, Kind, ignored, option, refused

GENERATORS = "SC"
NO_GUIDANCE = "the server has no classifier-free guidance; ikpy cli has"
NO_LISTS = "token lists are not supported; use --logit-bias or --grammar"
NO_REWIND = "the server bans strings; use --logit-bias or --grammar here"

ROWS = (
    option(
        "--samplers", Kind("A;B;...", sampling_values.to_samplers), "sampling.samplers", "sampler order", GENERATORS
    ),
    option(
        "--sampling-seq --sampler-seq",
        Kind("LETTERS", sampling_values.to_sampler_letters),
        "sampling.samplers",
        "sampler order by letters; dkfypmxntw is the default order, s is n",
        GENERATORS,
    ),
    option(
        "--temp --temperature",
        Kind("F", sampling_values.to_temperature),
        "sampling.temperature",
        "temperature; 0 = greedy",
        GENERATORS,
    ),
    option("--top-k", INT, "sampling.top_k", "most candidates; 0 = all", GENERATORS),
    option("--top-p", FLOAT, "sampling.top_p", "nucleus probability; 1 = off", GENERATORS),
    option("--min-p", FLOAT, "sampling.min_p", "least share of the top probability; 0 = off", GENERATORS),
    option("--tfs", FLOAT, "sampling.tfs_z", "tail-free sampling; 1 = off", GENERATORS),
    option("--typical --typical-p", FLOAT, "sampling.typical_p", "locally typical sampling; 1 = off", GENERATORS),
    option(
        "--top-n-sigma --top-nsigma",
        FLOAT,
        "sampling.top_n_sigma",
        "deviations below the largest logit; 0 = off",
        GENERATORS,
    ),
    option("--repeat-last-n", INT, "sampling.repeat_last_n", "penalty window; 0 = off, -1 = context", GENERATORS),
    option("--repeat-penalty", FLOAT, "sampling.repeat_penalty", "repetition penalty; 1 = off", GENERATORS),
    option("--presence-penalty", FLOAT, "sampling.presence_penalty", "presence penalty; 0 = off", GENERATORS),
    option("--frequency-penalty", FLOAT, "sampling.frequency_penalty", "frequency penalty; 0 = off", GENERATORS),
    option("--penalize-nl", FLAG, "sampling.penalize_nl", "newlines count for penalties", GENERATORS),
    option("--dynatemp-range", FLOAT, "sampling.dynatemp_range", "dynamic temperature range; 0 = off", GENERATORS),
    option("--dynatemp-exp", FLOAT, "sampling.dynatemp_exponent", "dynamic temperature exponent", GENERATORS),
    option("--mirostat", INT, "sampling.mirostat", "mirostat version 1 or 2; 0 = off", GENERATORS),
    option("--mirostat-lr", FLOAT, "sampling.mirostat_eta", "mirostat learning rate", GENERATORS),
    option("--mirostat-ent", FLOAT, "sampling.mirostat_tau", "mirostat target entropy", GENERATORS),
    option("--xtc-probability", FLOAT, "sampling.xtc_probability", "XTC probability; 0 = off", GENERATORS),
    option("--xtc-threshold", FLOAT, "sampling.xtc_threshold", "XTC threshold; above 0.5 = off", GENERATORS),
    option("--dry-multiplier", FLOAT, "sampling.dry_multiplier", "DRY strength; 0 = off", GENERATORS),
    option("--dry-base", FLOAT, "sampling.dry_base", "DRY base", GENERATORS),
    option("--dry-allowed-length", INT, "sampling.dry_allowed_length", "repeats DRY lets pass", GENERATORS),
    option("--dry-penalty-last-n", INT, "sampling.dry_penalty_last_n", "DRY window; -1 = context", GENERATORS),
    option(
        "--dry-sequence-breaker",
        Kind("TEXT", sampling_values.to_sequence_breakers, many=True),
        "sampling.dry_sequence_breakers",
        "each character breaks a DRY sequence; none = no breakers. Repeatable",
        GENERATORS,
    ),
    option("--adaptive-target", FLOAT, "sampling.adaptive_target", "adaptive-p target; negative = off", GENERATORS),
    option("--adaptive-decay", FLOAT, "sampling.adaptive_decay", "adaptive-p decay", GENERATORS),
    option("--adaptive-updt-w-cur", FLAG, "sampling.adaptive_updt_w_cur", "adaptive-p update rule", GENERATORS),
)

CONSTRAINT_ROWS = (
    option("--ignore-eos", FLAG, "sampling.ignore_eos", "go on after the end of text", GENERATORS),
    option(
        "-l --logit-bias",
        Kind("ID(+/-)V", sampling_values.to_logit_bias, many=True),
        "sampling.logit_bias",
        "value added to the logit of a token. Repeatable",
        GENERATORS,
    ),
    option("--grammar", TEXT, "sampling.grammar", "GBNF grammar of the output", GENERATORS),
    option(
        "--grammar-file",
        Kind("FILE", file_values.to_code_file),
        "sampling.grammar",
        "file with the grammar",
        GENERATORS,
    ),
    option("-j --json-schema", TEXT, "sampling.json_schema", "JSON schema of the output", GENERATORS),
    option(
        "-jf --json-schema-file",
        Kind("FILE", file_values.to_utf8_file),
        "sampling.json_schema",
        "file with the JSON schema",
        GENERATORS,
    ),
    ignored("-bs --backend-sampling", "samplers run on the CPU", "sampling on the GPU", GENERATORS),
    option("--cfg-negative-prompt", TEXT, "prompt.cfg_negative_prompt", "text to guide away from", "C"),
    option(
        "--cfg-negative-prompt-file",
        Kind("FILE", file_values.to_file_text),
        "prompt.cfg_negative_prompt",
        "file with the negative prompt",
        "C",
    ),
    option("--cfg-scale", FLOAT, "prompt.cfg_scale", "strength of guidance; 1 = none", "C"),
    refused("--cfg-negative-prompt", NO_GUIDANCE, "negative prompt", "S", TEXT),
    refused("--cfg-negative-prompt-file", NO_GUIDANCE, "file with the negative prompt", "S", PATH),
    ignored("--cfg-scale", NO_GUIDANCE, "strength of guidance", "S", FLOAT, quiet="1"),
    option(
        "--banned-string-file",
        Kind("FILE", file_values.to_file_lines),
        "server.banned_strings",
        "file with a string per line that may not appear in answers",
        "S",
    ),
    option(
        "--banned-n", COUNT_OR_ALL, "server.banned_n", "first tokens of such a string that are banned; -1 = all", "S"
    ),
    refused("--banned-string-file", NO_REWIND, "strings that may not appear", "C", PATH),
    ignored("--banned-n", NO_REWIND, "tokens banned per match", "C", INT),
    refused("--allowlist-pieces", NO_LISTS, "pieces that may appear", GENERATORS, TEXT),
    refused("--allowlist-unicode-rule", NO_LISTS, "characters that may appear", GENERATORS, TEXT),
    refused("--allowlist-keyword", NO_LISTS, "keyword that ends the list", GENERATORS, TEXT),
    ignored("--allowlist-keyword-delay", NO_LISTS, "tokens until the keyword counts", GENERATORS, INT),
    refused("--expiring-logit-bias-file", NO_LISTS, "biases that expire", GENERATORS, PATH),
)
