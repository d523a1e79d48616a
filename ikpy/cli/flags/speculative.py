"""Options of speculative decoding: accepted, the output is the same without it."""

from ikpy.cli.options import INT, PATH, TEXT, Kind, ignored

REASON = "speculative decoding is not supported; the text is the same without it"
FLAGS = "-mtp --multi-token-prediction", "-no-mtp --no-multi-token-prediction", "--spec-autotune"
TEXTS = (
    "-draft --draft-params",
    "--draft --draft-max --draft-n",
    "--draft-min --draft-n-min",
    "--draft-p-min",
    "--spec-type",
    "--spec-stage",
    "--spec-ngram-size-n",
    "--spec-ngram-size-m",
    "--spec-ngram-min-hits",
    "--suffix-pattern-len",
    "--suffix-max-depth",
    "--suffix-corpus",
    "--spec-ckpt-mode --recurrent-ckpt-mode",
    "-mtprot --mtp-requantize-output-tensor",
    "-lcs --lookup-cache-static",
    "-lcd --lookup-cache-dynamic -lookup-cache-dynamic",
    "-ctkd --cache-type-k-draft",
    "-ctvd --cache-type-v-draft",
)

ROWS = (
    ignored("-md --model-draft", REASON, "draft model", kind=PATH),
    ignored("-cd --ctx-size-draft", REASON, "context of the draft model", kind=INT),
    ignored("-td --threads-draft", REASON, "threads of the draft model", kind=INT),
    ignored("-tbd --threads-batch-draft", REASON, "prompt threads of the draft model", kind=INT),
    ignored("-ngld --gpu-layers-draft --n-gpu-layers-draft", REASON, "GPU layers of the draft model", kind=INT),
    ignored("--spec-replace", REASON, "replacement of text between the models", kind=Kind("TARGET DRAFT")),
    *(ignored(names, REASON, "tuning of speculative decoding", kind=TEXT) for names in TEXTS),
    *(ignored(names, REASON, "tuning of speculative decoding") for names in FLAGS),
)
