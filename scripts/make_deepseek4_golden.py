"""Records transformers' float32 logits of the checkpoint of DeepSeek V4 in tests/cpu/convert/deepseek4_checkpoints.py.

pip install torch transformers        # 5.24 or newer
python -m scripts.make_deepseek4_golden
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

from tests.cpu.convert import deepseek4_checkpoints as made

ROWS = (2, 6, 127, 139)
"""One in the first group of 4, one in the second, the last one of the group of 128, one behind it."""


def main() -> None:
    """Writes the golden file."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = made.write(Path(temporary) / "checkpoint")
        config = transformers.AutoConfig.from_pretrained(folder)
        config._attn_implementation = config._experts_implementation = "eager"
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=torch.float32, output_loading_info=True
        )
    if any(info[problem] for problem in ("missing_keys", "mismatched_keys", "unexpected_keys")):
        raise SystemExit(f"the checkpoint is not what transformers expects: {info}")
    tokens = made.tokens()
    with torch.no_grad():
        logits = model.eval()(torch.from_numpy(tokens)[None].long()).logits[0].numpy()
    np.savez_compressed(made.GOLDEN, tokens=tokens, rows=np.int32(ROWS), logits=logits[list(ROWS)])
    print(f"|logits| {np.abs(logits).mean():.2f}, {made.GOLDEN.stat().st_size} bytes")


if __name__ == "__main__":
    main()
