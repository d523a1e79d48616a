"""Options of prompts, text files and the chat program."""

from ikpy.cli import file_values, values
from ikpy.cli.options import COUNT_OR_ALL, FLAG, OFF, PATH, SWITCH, TEXT, Kind, ignored, option

ROWS = (
    option("-p --prompt", TEXT, "prompt.text", "text to process", "PIC"),
    option(
        "-f --file",
        Kind("FILE", file_values.to_prompt_file),
        "prompt.text",
        "file with the text; one newline at its end is dropped",
        "PIC",
        also="prompt.file",
    ),
    option(
        "-bf --binary-file",
        Kind("FILE", file_values.to_file_text),
        "prompt.text",
        "binary task file, read as it is",
        "PC",
        also="prompt.binary_file",
    ),
    option("-e --escape", FLAG, "prompt.escape", r"decode \n \r \t \' \" \\ \xHH in prompts, also from files", "PISC"),
    option("--no-escape", OFF, "prompt.escape", "leave backslashes in prompts alone", "PISC"),
    option("--chunks", COUNT_OR_ALL, "prompt.chunks", "most chunks to process; -1 = all", "PI"),
    option(
        "-n --predict --n-predict",
        Kind("N", values.bounded(-2)),
        "prompt.n_predict",
        "tokens to generate; -1 = no limit, -2 = until the context is full. In sweep-bench: generated tokens per row",
        "SWC",
        env="LLAMA_ARG_N_PREDICT",
    ),
    option("--keep", COUNT_OR_ALL, "prompt.n_keep", "prompt tokens kept when the context is shifted; -1 = all", "SC"),
    option("--in-file", Kind("FILE", many=True), "prompt.in_files", "importance matrix to add. Repeatable", "I"),
)

CHAT_ROWS = (
    option("-cnv --conversation", FLAG, "prompt.conversation", "chat with the model's template", "C"),
    option("-no-cnv --no-conversation", OFF, "prompt.conversation", "no chat", "C"),
    option(
        "-st --single-turn",
        FLAG,
        "prompt.single_turn",
        "chat that ends with the first answer; -p is the message",
        "C",
    ),
    option(
        "-sys --system-prompt", TEXT, "prompt.system", "system message of a chat; -p is then the first message", "C"
    ),
    option(
        "-sysf --system-prompt-file",
        Kind("FILE", file_values.to_prompt_file),
        "prompt.system",
        "file with the system message of a chat",
        "C",
    ),
    option("-i --interactive", FLAG, "prompt.interactive", "interactive mode", "C"),
    option("-if --interactive-first", FLAG, "prompt.interactive_first", "interactive, input first", "C"),
    option("-mli --multiline-input", FLAG, "prompt.multiline_input", "input of several lines", "C"),
    option("-co --color", SWITCH, "prompt.color", "coloured prompt and input on terminals", "C"),
    option("-sp --special", FLAG, "prompt.special", "print special tokens", "SC"),
    option("--display-prompt", FLAG, "prompt.display_prompt", "repeat the prompt", "C"),
    option("--no-display-prompt", OFF, "prompt.display_prompt", "do not repeat the prompt", "C"),
    option("--verbose-prompt", FLAG, "prompt.verbose_prompt", "print the tokens of the prompt", "C"),
    option(
        "--simple-io",
        FLAG,
        "prompt.simple_io",
        "leave the editing of lines to the terminal; always so where input or output is none",
        "C",
    ),
    option(
        "-r --reverse-prompt",
        Kind("TEXT", values.to_stop_text, many=True),
        "prompt.reverse_prompts",
        "stop at this text and return to the user. Repeatable",
        "SC",
    ),
    option("--in-prefix", TEXT, "prompt.in_prefix", "text before each input", "C"),
    option("--in-suffix", TEXT, "prompt.in_suffix", "text after each input", "C"),
    option("--in-prefix-bos", FLAG, "prompt.in_prefix_bos", "BOS before each input", "C"),
    option("--prompt-cache", PATH, "prompt.prompt_cache", "file with the state of the prompt", "C"),
    option("--prompt-cache-all", FLAG, "prompt.prompt_cache_all", "save input and output too", "C"),
    option("--prompt-cache-ro", FLAG, "prompt.prompt_cache_ro", "use the prompt cache, do not update it", "C"),
    option(
        "-ptc --print-token-count",
        COUNT_OR_ALL,
        "prompt.print_token_count",
        "print the token count every N tokens",
        "C",
    ),
    ignored("--infill", "send the text to the server's /infill route", "fill in the middle", "C"),
    option("--spm-infill", FLAG, "server.spm_infill", "/infill shows the suffix before the prefix", "S"),
)
