"""Records the float32 rows that transformers makes of a sound with the encoders of tests/cpu/sound_kinds.py.

pip install torch transformers        # 5.24 or newer
python -m scripts.make_sound_golden
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import transformers
from transformers.models.musicflamingo import modeling_musicflamingo as musicflamingo
from transformers.models.qwen2_audio import modeling_qwen2_audio as qwen2_audio
from transformers.models.voxtral import modeling_voxtral as voxtral

from scripts.tower_goldens import State, load
from tests.cpu.sound_kinds import GOLDEN_ROWS, GOLDENS, IN_TRANSFORMERS, TOWERS
from tests.cpu.sound_towers import SoundTower
from tests.sound_models import tone

LAYER = {
    "ln1": "self_attn_layer_norm",
    "ln2": "final_layer_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ffn_up": "fc1",
    "ffn_down": "fc2",
}


def encoder_state(tower: SoundTower) -> State:
    """Tensors of an encoder of transformers."""
    names = {"a.conv1d.1": "conv1", "a.conv1d.2": "conv2", "a.post_ln": "layer_norm"}
    names |= {"a.position_embd": "embed_positions"}
    names |= {f"a.blk.{i}.{mine}": f"layers.{i}.{theirs}" for i in range(tower.layers) for mine, theirs in LAYER.items()}
    found = {}
    for name, value in tower.weights().items():
        head, _, tail = name.rpartition(".")
        if head in names:
            found[f"{names[head]}.{tail}"] = value.reshape(-1) if tail == "bias" else value
    return found


def config(kind: type, tower: SoundTower, **more: object) -> transformers.PreTrainedConfig:
    """Of an encoder."""
    sizes = {"num_mel_bins": tower.mel, "encoder_layers": tower.layers, "encoder_attention_heads": tower.heads}
    sizes |= {"d_model": tower.d, "encoder_ffn_dim": tower.ff, "hidden_size": tower.d, "intermediate_size": tower.ff}
    sizes |= {"num_hidden_layers": tower.layers, "num_attention_heads": tower.heads, "max_source_positions": 1500}
    return kind(**sizes, **more, attn_implementation="eager")


def states(module: type, kind: type, tower: SoundTower, mel: torch.Tensor) -> torch.Tensor:
    """States behind an encoder."""
    model = load(module(config(kind, tower)), encoder_state(tower))
    return model(mel).last_hidden_state[0]


def matrix(tower: SoundTower, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A matrix of the projector and its bias."""
    weights = tower.weights()
    bias = weights.get(f"{name}.bias")
    return torch.from_numpy(weights[f"{name}.weight"]), None if bias is None else torch.from_numpy(bias)


def two_matrices(tower: SoundTower, x: torch.Tensor) -> torch.Tensor:
    """Two matrices around GELU."""
    first, second = (matrix(tower, f"mm.a.mlp.{i}") for i in (1, 2))
    x = torch.nn.functional.linear(x, *first)
    return torch.nn.functional.linear(torch.nn.functional.gelu(x), *second)


def qwen2a(tower: SoundTower, mel: torch.Tensor) -> torch.Tensor:
    """Qwen2-Audio."""
    x = states(qwen2_audio.Qwen2AudioEncoder, transformers.Qwen2AudioEncoderConfig, tower, mel)
    return torch.nn.functional.linear(x, *matrix(tower, "mm.a.fc"))


def of_voxtral(tower: SoundTower, mel: torch.Tensor) -> torch.Tensor:
    """Voxtral."""
    x = states(voxtral.VoxtralEncoder, transformers.VoxtralEncoderConfig, tower, mel)
    return two_matrices(tower, x.reshape(-1, tower.d * tower.stack))


def of_musicflamingo(tower: SoundTower, mel: torch.Tensor) -> torch.Tensor:
    """Music Flamingo."""
    kind = type(transformers.MusicFlamingoConfig().audio_config)
    model = load(transformers.AutoModel.from_config(config(kind, tower)), encoder_state(tower))
    mask = torch.ones(1, mel.shape[-1], dtype=torch.long)
    return two_matrices(tower, model(mel, input_features_mask=mask).last_hidden_state[0])


MODELS: dict[str, Callable[[SoundTower, torch.Tensor], torch.Tensor]] = {
    "qwen2a": qwen2a,
    "voxtral": of_voxtral,
    "musicflamingo": of_musicflamingo,
}


def main() -> None:
    """Writes the golden files."""
    GOLDENS.mkdir(exist_ok=True)
    for name in IN_TRANSFORMERS:
        tower = TOWERS[name]
        listen = transformers.WhisperFeatureExtractor(feature_size=tower.mel)
        mel = listen(tone(29.9), sampling_rate=16000, return_tensors="pt").input_features
        with torch.no_grad():
            rows = MODELS[name](tower, mel).numpy()
        path = GOLDENS / f"{name}.npz"
        np.savez_compressed(path, n=np.int32(len(rows)), rows=rows[list(GOLDEN_ROWS)])
        print(f"{name}: {rows.shape}, |rows| {np.abs(rows).mean():.2f}, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
