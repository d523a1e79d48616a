"""Options of single tools: perplexity, imatrix, sweep-bench, batched-bench; and of programs ikpy does not have."""

from ikpy.cli import values
from ikpy.cli.options import COUNT, FLAG, OFF, PATH, TEXT, Kind, always, ignored, option

OTHER = "used by other programs only"
OTHER_VALUES = (
    "--context-file",
    "--chunk-size",
    "--chunk-separator",
    "--junk",
    "--pos",
    "--positive-file",
    "--negative-file",
    "--pca-batch",
    "--pca-iter",
    "--method",
)

PERPLEXITY_ROWS = (
    option("--ppl-stride", COUNT, "perplexity.stride", "distance of evaluated windows; 0 = whole chunks", "P"),
    option(
        "--ppl-output-type",
        Kind("0|1", values.bounded(0, 1)),
        "perplexity.output_type",
        "1 prints a table of values instead of a running line",
        "P",
    ),
    option(
        "--kl-divergence-base --save-all-logits",
        PATH,
        "perplexity.logits_file",
        "file of logits to write, or with --kl-divergence to read",
        "P",
    ),
    option("--kl-divergence", FLAG, "perplexity.kl_divergence", "compare with the logits of another model", "P"),
    option("--hellaswag", FLAG, "perplexity.hellaswag", "HellaSwag score of the file given with -f", "P"),
    option("--hellaswag-tasks", Kind("N", values.bounded(1)), "perplexity.hellaswag_tasks", "tasks to evaluate", "P"),
    option("--winogrande", FLAG, "perplexity.winogrande", "Winogrande score of the file given with -f", "P"),
    option("--winogrande-tasks", COUNT, "perplexity.winogrande_tasks", "tasks to evaluate; 0 = all", "P"),
    option("--multiple-choice", FLAG, "perplexity.multiple_choice", "multiple choice score of the file of -bf", "P"),
    option("--multiple-choice-tasks", COUNT, "perplexity.multiple_choice_tasks", "tasks to evaluate; 0 = all", "P"),
    always("--perplexity --all-logits", "perplexity over the whole context", "P"),
)

IMATRIX_ROWS = (
    option("-o --output --output-file", PATH, "imatrix.output", "file to write", "I"),
    option("--output-draft --draft-output --draft-output-file", PATH, "imatrix.output_draft", "second file", "I"),
    option("-ofreq --output-frequency", COUNT, "imatrix.output_frequency", "save every N chunks", "I"),
    option("--save-frequency", COUNT, "imatrix.save_frequency", "keep a copy every N chunks; 0 = never", "I"),
    option("--process-output", FLAG, "imatrix.process_output", "collect for the output matrix too", "I"),
    option("--mtp --nextn", FLAG, "imatrix.predicts", "collect for prediction layers too", "I"),
    option("--output-tensor-name", TEXT, "imatrix.output_tensor_name", "name of the output matrix", "I"),
    option("--parse-special", FLAG, "imatrix.parse_special", "special tokens in the text are read as such", "I"),
    option("--no-ppl", OFF, "imatrix.compute_ppl", "no perplexity along the way", "I"),
    option("--chunk --from-chunk", COUNT, "imatrix.from_chunk", "first chunk", "I"),
    option("-lsim --layer-similarity", FLAG, "imatrix.layer_similarity", "similarity of layers", "I"),
    option(
        "--output-format",
        Kind("auto|dat|gguf", values.choice("auto", "dat", "gguf")),
        "imatrix.output_format",
        "form of the file; auto: by its name",
        "I",
    ),
    option("--show-statistics", FLAG, "imatrix.show_statistics", "print statistics of the matrix", "I"),
)

TABLE = Kind("md|jsonl|csv", values.to_table_format)

SWEEP_ROWS = (
    option("-wb --warmup-batch", FLAG, "sweep.warmup_batch", "one untimed batch before the first row", "W"),
    option(
        "-nrep --n-repetitions",
        Kind("N", values.bounded(1)),
        "sweep.n_repetitions",
        "repetitions of the first row, averaged",
        "W",
    ),
    option("--sweep-stride", Kind("N", values.bounded(1)), "sweep.stride", "measure every N-th row", "W"),
    option("--sweep-memory", FLAG, "sweep.memory", "columns for peak memory", "W"),
    option("--output-format", TABLE, "sweep.output_format", "md (or table), jsonl or csv", "W"),
)

COUNTS = Kind("N,N,...", values.to_counts)

BATCHED_ROWS = (
    option("-npp", COUNTS, "batched.n_prompt", "prompt tokens of each sequence", "B"),
    option("-ntg", COUNTS, "batched.n_generate", "generated tokens of each sequence", "B"),
    option("-npl", COUNTS, "batched.n_sequences", "number of sequences", "B"),
    option("-pps", FLAG, "batched.shared", "all sequences share one prompt", "B"),
    option("-tgs", FLAG, "batched.separate", "one sequence is generated after the other", "B"),
    option("--output-format", TABLE, "batched.output_format", "md (or table), jsonl or csv", "B"),
)

OTHER_ROWS = (*(ignored(names, OTHER, "option of another tool", kind=TEXT) for names in OTHER_VALUES),)
