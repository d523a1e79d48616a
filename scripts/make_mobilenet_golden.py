"""Records the float32 rows that timm's encoder of Gemma 3n and the norms and matrix of transformers make of random
pictures with the weights of tests/cpu/media/mobilenet_tower.py.

pip install torch timm transformers        # 1.0.31 and 5.24 or newer
python -m scripts.make_mobilenet_golden
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from timm.layers import RmsNorm2d
from timm.models._efficientnet_builder import decode_arch_def
from timm.models.mobilenetv5 import MobileNetV5Encoder, MobileNetV5MultiScaleFusionAdapter
from transformers.models.gemma3n.configuration_gemma3n import Gemma3nTextConfig, Gemma3nVisionConfig
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nMultimodalEmbedder

from scripts.tower_goldens import State, load
from tests.cpu.media.mobilenet_tower import GOLDEN, GOLDEN_ROWS, STAGES, STEM, MobileTower
from tests.cpu.media.projector_files import Weights

SIDES = (256, 512)


def encoder(t: MobileTower) -> MobileNetV5Encoder:
    """With other results of the fusion than those of published ones."""
    made = MobileNetV5Encoder(
        decode_arch_def([list(stage) for stage in STAGES]),
        stem_size=STEM,
        fix_stem=True,
        pad_type="same",
        norm_layer=RmsNorm2d,
        act_layer=partial(torch.nn.GELU, approximate="tanh"),
        layer_scale_init_value=1e-5,
    )
    inputs = [made.feature_info[i]["num_chs"] for i in (-2, -1)]
    made.msfa = MobileNetV5MultiScaleFusionAdapter(
        inputs, t.fused, 16, norm_layer=RmsNorm2d, act_layer=partial(torch.nn.GELU, approximate="tanh")
    )
    return made


def state(w: Weights) -> State:
    """Tensors of the encoder."""
    found = {}
    for name, value in w.items():
        if name.startswith("v."):
            flat = name.endswith(("layer_scale.gamma", "conv.bias"))
            found[name.removeprefix("v.").replace("blk.", "blocks.", 1)] = value.reshape(-1) if flat else value
    return found


def embedder(t: MobileTower, w: Weights) -> Gemma3nMultimodalEmbedder:
    """Norms and the matrix behind it."""
    made = Gemma3nMultimodalEmbedder(
        Gemma3nVisionConfig(hidden_size=t.fused, vocab_size=2), Gemma3nTextConfig(hidden_size=t.text)
    )
    names = {"soft_embedding_norm": "mm.soft_emb_norm", "embedding_projection": "mm.input_projection"}
    wanted = {f"{theirs}.weight": w[f"{mine}.weight"] for theirs, mine in names.items()}
    wanted |= {name: value.numpy() for name, value in made.state_dict().items() if name not in wanted}
    return load(made, wanted)


def main() -> None:
    """Writes the file."""
    found = {}
    for side in SIDES:
        t = MobileTower(side=side)
        w = t.weights()
        model = load(encoder(t), state(w))
        picture = np.random.default_rng(3).integers(0, 256, (side, side, 3), dtype=np.uint8)
        pixels = torch.tensor(picture / 255, dtype=torch.float32).permute(2, 0, 1)[None]
        with torch.no_grad():
            states = model(pixels).reshape(1, t.fused, 256).permute(0, 2, 1) * t.fused**0.5
            rows = embedder(t, w)(inputs_embeds=states)[0].numpy()
        found[f"rows{side}"] = rows[list(GOLDEN_ROWS)]
    np.savez_compressed(GOLDEN, **found)
    print(f"{GOLDEN}: {GOLDEN.stat().st_size} bytes")


if __name__ == "__main__":
    main()
