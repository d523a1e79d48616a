"""Records transformers' float32 logits of the checkpoints of tests/cpu/seeded_checkpoints.py, mamba2_checkpoints.py,
glm5_next_checkpoints.py and minimax_m3_checkpoints.py.

pip install torch transformers        # 5.24 or newer
python -m scripts.make_seeded_golden
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

from tests.cpu import dots3note_checkpoints, glm5_next_checkpoints, mamba2_checkpoints, minimax_m3_checkpoints
from tests.cpu import seeded_checkpoints as made

MODULES = (made, mamba2_checkpoints, glm5_next_checkpoints, minimax_m3_checkpoints, dots3note_checkpoints)
IMAGES = ("model.visual.", "model.vision_tower.", "model.multi_modal_projector.")
ROWS = (0, 3, 30, 69)
N_COLUMNS = 96


def main() -> None:
    """Writes the golden files."""
    for tiny in (tiny for module in MODULES for tiny in module.CHECKPOINTS):
        with tempfile.TemporaryDirectory() as temporary:
            folder = made.write(tiny, Path(temporary) / "checkpoint")
            config = transformers.AutoConfig.from_pretrained(folder)
            config._attn_implementation = config._experts_implementation = "eager"
            model_class = getattr(transformers, config.architectures[0])  # not all are known to AutoModelForCausalLM
            model, info = model_class.from_pretrained(
                folder, config=config, dtype=torch.float32, output_loading_info=True
            )
        # Checkpoints have text models alone.
        info["missing_keys"] = [name for name in info["missing_keys"] if not name.startswith(IMAGES)]
        if any(info[problem] for problem in ("missing_keys", "mismatched_keys", "unexpected_keys")):
            raise SystemExit(f"{tiny.name}: the checkpoint is not what transformers expects: {info}")
        tokens = torch.from_numpy(made.tokens())[None].long()
        with torch.no_grad():
            logits = model.eval()(tokens).logits[0].numpy()
        np.savez_compressed(tiny.golden, rows=np.int32(ROWS), logits=logits[list(ROWS), :N_COLUMNS])
        print(f"{tiny.name}: |logits| {np.abs(logits).mean():.2f}, {tiny.golden.stat().st_size} bytes")


if __name__ == "__main__":
    main()
