"""Hugging Face checkpoints (safetensors) to GGUF.

`checkpoint.py` reads files, `weights.py` the numbers in them, `families/` knows names and hyper-parameters of each
architecture, `tokenizer.py` makes the vocabulary keys, `conversion.py` plans the file. `projectors/` and
`projection.py` do so for the encoder of pictures. `planned_file.py` streams files out.
"""

from __future__ import annotations

from ikpy.convert.conversion import Conversion
from ikpy.convert.options import ConvertOptions
from ikpy.convert.projection import ProjectorConversion

__all__ = ["Conversion", "ConvertOptions", "ProjectorConversion"]
