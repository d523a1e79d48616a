"""Rows of the option table, one module per group."""

from ikpy.cli.flags import context, loading, logging, model, placement, prompt, sampling, server, speculative, tasks

GROUPS = (
    ("Model", model.ROWS),
    ("Context and batches", context.ROWS),
    ("Attention and experts", context.ATTENTION_ROWS),
    ("RoPE", context.ROPE_ROWS),
    ("Loading and memory", loading.ROWS),
    ("Placement on devices", placement.ROWS),
    ("Prompt and text", prompt.ROWS),
    ("Chat program", prompt.CHAT_ROWS),
    ("Sampling", sampling.ROWS),
    ("Constraints", sampling.CONSTRAINT_ROWS),
    ("Perplexity", tasks.PERPLEXITY_ROWS),
    ("Importance matrix", tasks.IMATRIX_ROWS),
    ("Sweep benchmark", tasks.SWEEP_ROWS),
    ("Batched benchmark", tasks.BATCHED_ROWS),
    ("Server", server.ROWS),
    ("Server cache", server.CACHE_ROWS),
    ("Chat templates and reasoning", server.CHAT_ROWS),
    ("Images and audio", server.MULTIMODAL_ROWS),
    ("Speculative decoding", speculative.ROWS),
    ("Logging", logging.ROWS),
    ("Options of other programs", tasks.OTHER_ROWS),
)
