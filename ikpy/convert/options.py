"""What a conversion is asked for."""

from __future__ import annotations

from dataclasses import dataclass

OUTPUT_TYPES = ("f32", "f16", "bf16", "q8_0", "auto")
PREDICTION = ("keep", "none", "only")


@dataclass(frozen=True)
class ConvertOptions:
    """outtype: one of OUTPUT_TYPES; outfile "" is `<folder>/<name>-<TYPE>.gguf`; limits per file as GGUFWriter.

    prediction: whether layers that predict further tokens are kept, left out, or all that is written, with what they
    share with the model; one of PREDICTION. chat_template_file: jinja2 text that replaces the templates of the
    checkpoint; "" keeps those. target: folder of the model that a drafter reads, "" for other checkpoints.
    """

    outtype: str = "auto"
    outfile: str = ""
    model_name: str = ""
    pre: str = ""
    chat_template_file: str = ""
    split_max_tensors: int | None = None
    split_max_bytes: int | None = None
    prediction: str = "keep"
    target: str = ""
