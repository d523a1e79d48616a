"""Records the float32 rows that transformers makes of a sound with the encoders of tests/cpu/media/sound_kinds.py.

pip install torch transformers        # 5.24 or newer
python -m scripts.make_sound_golden
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import transformers
from transformers.models.audioflamingo3 import modeling_audioflamingo3 as audioflamingo3
from transformers.models.gemma4 import configuration_gemma4 as gemma4
from transformers.models.gemma4 import modeling_gemma4
from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor
from transformers.models.gemma4_unified import configuration_gemma4_unified as unified_configuration
from transformers.models.gemma4_unified import modeling_gemma4_unified as unified
from transformers.models.gemma4_unified.feature_extraction_gemma4_unified import Gemma4UnifiedAudioFeatureExtractor
from transformers.models.qwen2_5_omni import configuration_qwen2_5_omni as omni_configuration
from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as omni
from transformers.models.qwen2_audio import modeling_qwen2_audio as qwen2_audio
from transformers.models.qwen3_omni_moe import configuration_qwen3_omni_moe as omni3_configuration
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as omni3
from transformers.models.voxtral import modeling_voxtral as voxtral

from scripts.tower_goldens import State, load
from tests.cpu.media.sound_kinds import (
    GEMMA,
    GEMMA_LAYER,
    GOLDEN_ROWS,
    GOLDENS,
    IN_TRANSFORMERS,
    TOWERS,
    golden_sound,
)
from tests.cpu.media.sound_towers import CHANNELS, SoundTower

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


WHISPER = {
    "a.conv1d.1": "conv1",
    "a.conv1d.2": "conv2",
    "a.post_ln": "layer_norm",
    "a.position_embd": "embed_positions",
}
OMNI = {"a.conv1d.1": "conv1", "a.conv1d.2": "conv2", "a.post_ln": "ln_post", "mm.a.fc": "proj"}
OMNI3 = {"a.conv_out": "conv_out", "a.post_ln": "ln_post", "mm.a.mlp.1": "proj1", "mm.a.mlp.2": "proj2"}
OMNI3 |= {f"a.conv2d.{i}": f"conv2d{i}" for i in (1, 2, 3)}


def encoder_state(tower: SoundTower, parts: dict[str, str] = WHISPER) -> State:
    """Tensors of an encoder of transformers."""
    names = dict(parts)
    names |= {
        f"a.blk.{i}.{mine}": f"layers.{i}.{theirs}" for i in range(tower.layers) for mine, theirs in LAYER.items()
    }
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


def of_flamingo(tower: SoundTower, mel: torch.Tensor) -> torch.Tensor:
    """Audio Flamingo 3."""
    model = audioflamingo3.AudioFlamingo3Encoder(config(transformers.AudioFlamingo3EncoderConfig, tower))
    load(model, encoder_state(tower))
    mask = torch.ones(1, mel.shape[-1], dtype=torch.long)
    return two_matrices(tower, model(mel, input_features_mask=mask).last_hidden_state[0])


def with_positions(model: torch.nn.Module, tower: SoundTower) -> None:
    """Puts the positions of a file where the model computes its own."""
    table = torch.from_numpy(tower.weights()["a.position_embd.weight"])
    model.positional_embedding.positional_embedding = table


def of_omni(tower: SoundTower, mel: torch.Tensor) -> torch.Tensor:
    """Qwen2.5-Omni, which hears silence up to 300 seconds before it leaves it out."""
    kind = omni_configuration.Qwen2_5OmniAudioEncoderConfig
    model = omni.Qwen2_5OmniAudioEncoder(config(kind, tower, n_window=100, output_dim=tower.text))
    load(model, encoder_state(tower, OMNI), "audio_bos_eos_token")
    with_positions(model, tower)
    n = len(golden_sound(tower.kind)) // 160
    return model(mel[0, :, :n], feature_lens=torch.tensor([n])).last_hidden_state


def of_omni3(tower: SoundTower, mel: torch.Tensor) -> torch.Tensor:
    """Qwen3-Omni."""
    kind = omni3_configuration.Qwen3OmniMoeAudioEncoderConfig
    more = {"n_window": 50, "n_window_infer": 800, "output_dim": tower.text, "downsample_hidden_size": CHANNELS}
    model = omni3.Qwen3OmniMoeAudioEncoder(config(kind, tower, **more))
    load(model, encoder_state(tower, OMNI3))
    with_positions(model, tower)
    return model(mel[0], feature_lens=torch.tensor([mel.shape[-1]])).last_hidden_state


def of_gemma(tower: SoundTower, mel: torch.Tensor) -> torch.Tensor:
    """Gemma 4, which hears its own spectrogram; files hold the scales of queries behind softplus."""
    size = gemma4.Gemma4AudioConfig(
        hidden_size=tower.d,
        num_hidden_layers=tower.layers,
        num_attention_heads=tower.heads,
        subsampling_conv_channels=[tower.mel, 4],
        output_proj_dims=tower.d + 32,
    )
    weights = tower.weights()
    projection = torch.from_numpy(weights.pop("mm.a.input_projection.weight"))
    state = {}
    for name, value in weights.items():
        head, _, tail = name.rpartition(".")
        if head in GEMMA:
            state[f"{GEMMA[head]}.{tail}"] = value
            continue
        _, _, il, part = head.split(".")
        if part == "per_dim_scale":
            state[f"layers.{il}.self_attn.{part}"] = np.log(np.expm1(value))
            continue
        module = GEMMA_LAYER[part] if tail == "weight" else GEMMA_LAYER[part].removesuffix(".linear")
        state[f"layers.{il}.{module}.{tail}"] = value[:, None] if part == "conv_dw" else np.squeeze(value)
    model = modeling_gemma4.Gemma4AudioModel(size)
    bounds = {name: value.numpy() for name, value in model.state_dict().items() if name.endswith(("_min", "_max"))}
    load(model, bounds | state)
    listen = Gemma4AudioFeatureExtractor(feature_size=tower.mel)
    heard = listen([golden_sound(tower.kind)], return_tensors="pt")
    found = model(heard["input_features"], heard["input_features_mask"])
    rows = found.last_hidden_state[0][found.attention_mask[0].bool()]
    rows = rows / torch.sqrt((rows * rows).mean(-1, keepdim=True) + size.rms_norm_eps)
    return torch.nn.functional.linear(rows, projection)


def of_unified(tower: SoundTower, mel: torch.Tensor) -> torch.Tensor:
    """Gemma 4 without encoders, which hears samples."""
    text = unified_configuration.Gemma4UnifiedTextConfig(hidden_size=tower.text)
    model = unified.Gemma4UnifiedMultimodalEmbedder(unified_configuration.Gemma4UnifiedAudioConfig(), text)
    load(model, {"embedding_projection.weight": tower.weights()["mm.a.input_projection.weight"]})
    heard = Gemma4UnifiedAudioFeatureExtractor()(golden_sound(tower.kind), return_tensors="pt")
    return model(heard["input_features"])[0]


MODELS: dict[str, Callable[[SoundTower, torch.Tensor], torch.Tensor]] = {
    "qwen2a": qwen2a,
    "voxtral": of_voxtral,
    "musicflamingo": of_flamingo,
    "gemma4a": of_gemma,
    "gemma4ua": of_unified,
    "qwen3a": of_omni3,
    "qwen2.5o": of_omni,
}


def main() -> None:
    """Writes the golden files."""
    GOLDENS.mkdir(exist_ok=True)
    for name in IN_TRANSFORMERS:
        tower = TOWERS[name]
        listen = transformers.WhisperFeatureExtractor(feature_size=tower.mel)
        padding = "longest" if name == "qwen3a" else "max_length"
        mel = listen(golden_sound(name), sampling_rate=16000, padding=padding, return_tensors="pt").input_features
        with torch.no_grad():
            rows = MODELS[name](tower, mel).numpy()
        path = GOLDENS / f"{name}.npz"
        np.savez_compressed(path, n=np.int32(len(rows)), rows=rows[list(GOLDEN_ROWS)])
        print(f"{name}: {rows.shape}, |rows| {np.abs(rows).mean():.2f}, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
