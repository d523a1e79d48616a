"""Records transformers' float32 logits, of encoders the states of their last layer, of the checkpoints of
tests/cpu/convert/seeded_kinds.py.

pip install torch transformers        # 5.24 or newer
python -m scripts.make_seeded_golden
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

from tests.cpu.convert import seeded_checkpoints as made
from tests.cpu.convert import t5_checkpoints
from tests.cpu.convert.seeded_kinds import KINDS

IMAGES = tuple(
    f"model.{part}."
    for part in ("visual", "vision_tower", "vision_model", "multi_modal_projector", "connector", "audio_tower")
)
ROWS = (0, 3, 30, 69)
N_COLUMNS = 96


def main() -> None:
    """Writes the golden files."""
    for tiny in (*KINDS, *t5_checkpoints.DECODERS):
        with tempfile.TemporaryDirectory() as temporary:
            folder = made.write(tiny, Path(temporary) / "checkpoint", for_transformers=True)
            config = transformers.AutoConfig.from_pretrained(folder)
            config._attn_implementation = config._experts_implementation = "eager"
            # Neither knows all of them.
            model_class = getattr(transformers, config.architectures[0], transformers.AutoModelForCausalLM)
            model, info = model_class.from_pretrained(
                folder, config=config, dtype=torch.float32, output_loading_info=True
            )
        # Checkpoints have text models alone.
        info["missing_keys"] = [name for name in info["missing_keys"] if not name.startswith(IMAGES)]
        if any(info[problem] for problem in ("missing_keys", "mismatched_keys", "unexpected_keys")):
            raise SystemExit(f"{tiny.name}: the checkpoint is not what transformers expects: {info}")
        tokens = torch.from_numpy(made.tokens())[None].long()
        decoder = torch.from_numpy(t5_checkpoints.decoder_tokens()).long()
        with torch.no_grad():
            further = {"decoder_input_ids": decoder[None]} if tiny in t5_checkpoints.DECODERS else {}
            found = model.eval()(tokens, **further)
        logits = (found.logits if "logits" in found else found.last_hidden_state)[0].numpy()
        np.savez_compressed(tiny.golden, rows=np.int32(ROWS), logits=logits[list(ROWS), :N_COLUMNS])
        print(f"{tiny.name}: |logits| {np.abs(logits).mean():.2f}, {tiny.golden.stat().st_size} bytes")


if __name__ == "__main__":
    main()
