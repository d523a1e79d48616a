"""Records the float32 rows that transformers makes of a sound with tests/cpu/media/conformer_kinds.py.

pip install torch torchaudio transformers        # 5.24 or newer
python -m scripts.make_conformer_golden
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import transformers
from transformers.models.dots3_note import modeling_dots3_note as dots3note
from transformers.models.dots3_note.feature_extraction_dots3_note import Dots3NoteFeatureExtractor
from transformers.models.gemma3n import modeling_gemma3n as gemma3n
from transformers.models.gemma3n.feature_extraction_gemma3n import Gemma3nAudioFeatureExtractor
from transformers.models.granite_speech import modeling_granite_speech as granite
from transformers.models.granite_speech.feature_extraction_granite_speech import GraniteSpeechFeatureExtractor
from transformers.models.granite_speech_plus import configuration_granite_speech_plus as plus_configuration
from transformers.models.granite_speech_plus import modeling_granite_speech_plus as plus
from transformers.models.nemotron_h_omni import modeling_nemotron_h_omni as omni
from transformers.models.parakeet import modeling_parakeet as parakeet
from transformers.models.parakeet.feature_extraction_parakeet import ParakeetFeatureExtractor

from scripts.tower_goldens import State, load
from tests.cpu.media.conformer_kinds import (
    DOTS3NOTE,
    DOTS3NOTE_LAYER,
    FAST_NAMES,
    GEMMA3N,
    GEMMA3N_LAYER,
    GRANITE_NAMES,
    GRANITE_WINDOW_NAMES,
)
from tests.cpu.media.conformer_weights import CHANNELS, CHARACTERS, WINDOW_LAYERS
from tests.cpu.media.sound_kinds import GOLDEN_ROWS, GOLDENS, TOWERS, golden_sound
from tests.cpu.media.sound_towers import SoundTower


def granite_state(tower: SoundTower) -> tuple[State, State]:
    """Tensors of the encoder and of what follows it."""
    weights, encoder, projector = tower.weights(), {}, {}
    for il in range(tower.layers):
        keys, values = (weights.pop(f"a.blk.{il}.attn_{part}.weight") for part in "kv")
        encoder[f"layers.{il}.attn.to_kv.weight"] = np.concatenate([keys, values])
        for part, value in (("running_mean", 0), ("running_var", 1 - 1e-5)):
            encoder[f"layers.{il}.conv.batch_norm.{part}"] = np.full(2 * tower.d, value, np.float32)
        encoder[f"layers.{il}.conv.batch_norm.num_batches_tracked"] = np.array(1)
    for name, value in weights.items():
        head, _, tail = name.rpartition(".")
        parts = name.split(".")
        if name.startswith("a.blk"):
            module = GRANITE_NAMES[parts[3]]
            tail = tail if len(parts) == 5 else "weight"
            shaped = value[:, None] if parts[3] == "conv_dw" else value
            is_filter = parts[3] in ("conv_pw1", "conv_pw2") and tail == "weight"
            encoder[f"layers.{parts[2]}.{module}.{tail}"] = shaped[..., None] if is_filter else shaped
        elif name.startswith("a.proj_blk"):
            projector[f"qformer.encoder.layer.{parts[2]}.{GRANITE_WINDOW_NAMES[parts[3]]}.{tail}"] = value
        elif head in GRANITE_NAMES:
            encoder[f"{GRANITE_NAMES[head]}.{tail}"] = value
        else:
            full = "query" if name == "a.proj_query" else f"{GRANITE_WINDOW_NAMES[head]}.{tail}"
            projector[full] = value
    return encoder, projector


def of_granite(tower: SoundTower, sound: np.ndarray) -> torch.Tensor:
    """Granite Speech, and that whose rows have states of earlier layers."""
    further = dict(tower.further)
    layers = further.get("feature_layer")
    sizes = {"input_dim": tower.mel, "num_layers": tower.layers, "hidden_dim": tower.d, "num_heads": tower.heads}
    sizes |= {"output_dim": CHARACTERS, "context_size": further["chunk_size"], "max_pos_emb": further["max_pos_emb"]}
    sizes |= {"conv_kernel_size": further["conv_kernel_size"], "feedforward_mult": tower.ff / tower.d}
    n_state = tower.d * (1 + len(layers or ()))
    q_former = transformers.Blip2QFormerConfig(
        hidden_size=tower.d,
        num_hidden_layers=WINDOW_LAYERS,
        num_attention_heads=further["projector.head_count"],
        intermediate_size=tower.ff,
        cross_attention_frequency=1,
        encoder_hidden_size=n_state,
    )
    kinds = (plus, plus_configuration, "GraniteSpeechPlus") if layers else (granite, transformers, "GraniteSpeech")
    models, configurations, name = kinds
    sizes |= {"cat_hidden_layers": layers} if layers else {}
    size = getattr(configurations, f"{name}EncoderConfig")(**{**sizes, "feedforward_mult": 1})
    size.feedforward_mult = tower.ff // tower.d
    whole = getattr(configurations, f"{name}Config")(
        text_config=transformers.GraniteConfig(hidden_size=tower.text),
        encoder_config=size,
        projector_config=q_former,
        window_size=further["projector.window_size"],
        downsample_rate=further["projector.downsample_rate"],
    )
    encoder = getattr(models, f"{name}CTCEncoder")(size)
    projector = getattr(models, f"{name}EncoderProjector")(whole)
    states = granite_state(tower)
    load(encoder, states[0], "attention_dists")
    load(projector, states[1])
    heard = GraniteSpeechFeatureExtractor(n_mels=tower.mel // 2)(sound)["input_features"]
    return projector(encoder(heard).last_hidden_state)[0]


def fast_state(tower: SoundTower) -> State:
    """Tensors of a FastConformer; a norm over batches has mean 0 and variance 1."""
    state = {}
    for il in range(tower.layers):
        for part, value in (("running_mean", 0), ("running_var", 1 - 1e-5)):
            state[f"layers.{il}.conv.norm.{part}"] = np.full(tower.d, value, np.float32)
        state[f"layers.{il}.conv.norm.num_batches_tracked"] = np.array(1)
    for name, value in tower.weights().items():
        head, _, tail = name.rpartition(".")
        parts = name.split(".")
        if name.startswith("a.blk"):
            if parts[3] in ("conv_norm_mean", "conv_norm_var"):
                state[f"layers.{parts[2]}.conv.norm.running_{name[-4:].strip('_')}"] = value
                continue
            if parts[3].startswith("pos_bias"):
                state[f"layers.{parts[2]}.self_attn.bias_{name[-1]}"] = value
                continue
            shaped = value[:, None] if parts[3:] == ["conv_dw", "weight"] else value
            is_filter = parts[3] in ("conv_pw1", "conv_pw2") and tail == "weight"
            state[f"layers.{parts[2]}.{FAST_NAMES[parts[3]]}.{tail}"] = shaped[..., None] if is_filter else shaped
        elif head in FAST_NAMES:
            state[f"{FAST_NAMES[head]}.{tail}"] = value.reshape(-1) if tail == "bias" else value
    return state


def fast_model(tower: SoundTower, *, bias: bool) -> torch.nn.Module:
    """A FastConformer."""
    size = transformers.ParakeetEncoderConfig(
        hidden_size=tower.d,
        num_hidden_layers=tower.layers,
        num_attention_heads=tower.heads,
        intermediate_size=tower.ff,
        num_mel_bins=tower.mel,
        subsampling_conv_channels=CHANNELS,
        attention_bias=bias,
        convolution_bias=bias,
        scale_input=False,
        conv_kernel_size=9,
        attn_implementation="eager",
    )
    return load(parakeet.ParakeetEncoder(size), fast_state(tower))


def fast_frames(tower: SoundTower, sound: np.ndarray) -> transformers.BatchFeature:
    """Frames, and which of them are heard."""
    return ParakeetFeatureExtractor(feature_size=tower.mel)(sound, sampling_rate=16000, return_tensors="pt")


def of_lfm2(tower: SoundTower, sound: np.ndarray) -> torch.Tensor:
    """LFM2-Audio, whose encoder is that of Parakeet with biases."""
    x = fast_model(tower, bias=True)(fast_frames(tower, sound)["input_features"]).last_hidden_state[0]
    weights = {name: torch.from_numpy(value) for name, value in tower.weights().items()}
    norm, first, second = ((weights[f"mm.a.mlp.{i}.weight"], weights[f"mm.a.mlp.{i}.bias"]) for i in (0, 1, 3))
    x = torch.nn.functional.linear(torch.nn.functional.layer_norm(x, (tower.d,), *norm), *first)
    return torch.nn.functional.linear(torch.nn.functional.gelu(x), *second)


def of_parakeet(tower: SoundTower, sound: np.ndarray) -> torch.Tensor:
    """The encoder of sound of Nemotron 3 Nano Omni, to which the last frame is none."""
    frames = fast_frames(tower, sound)
    x = fast_model(tower, bias=False)(**frames).last_hidden_state[0]
    projector = omni.NemotronH_Omni_Reasoning_V3MultiModalProjector(tower.d, tower.ff, tower.text)
    names = {"mm.a.norm_pre": "layer_norm", "mm.a.mlp.1": "linear_1", "mm.a.mlp.2": "linear_2"}
    weights = tower.weights()
    state = {f"{theirs}.weight": weights[f"{mine}.weight"] for mine, theirs in names.items()}
    return load(projector, state)(x)


def of_gemma3n(tower: SoundTower, sound: np.ndarray) -> torch.Tensor:
    """Gemma 3n, whose rows behind the sound are those of the last token of a table."""
    weights, state, embedder = tower.weights(), {}, {}
    for name, value in weights.items():
        head, _, tail = name.rpartition(".")
        parts = name.split(".")
        if name.startswith("mm.a"):
            module = {"hard_emb_norm": "hard_embedding_norm", "soft_emb_norm": "soft_embedding_norm"}.get(parts[2])
            module = module or {"input_projection": "embedding_projection"}.get(parts[2], parts[2])
            embedder[f"{module}.weight"] = value
        elif head in GEMMA3N:
            state[f"{GEMMA3N[head]}.{tail}"] = value
        elif parts[3] == "per_dim_scale":
            state[f"conformer.{parts[2]}.attention.attn.per_dim_scale"] = value
        else:
            state[f"conformer.{parts[2]}.{GEMMA3N_LAYER[parts[3]]}.{tail}"] = value
    count = len(weights["mm.a.embedding.weight"])
    size = transformers.Gemma3nAudioConfig(
        vocab_size=count,
        input_feat_size=tower.mel,
        hidden_size=tower.d,
        conf_num_attention_heads=tower.heads,
        conf_num_hidden_layers=tower.layers,
        sscp_conv_channel_size=(CHANNELS, 4),
    )
    encoder = load(gemma3n.Gemma3nAudioEncoder(size), state, "inv_timescales")
    text = transformers.Gemma3nTextConfig(hidden_size=tower.text)
    table = load(gemma3n.Gemma3nMultimodalEmbedder(size, text), embedder)
    heard = Gemma3nAudioFeatureExtractor(feature_size=tower.mel)([sound], return_tensors="pt")
    found = encoder(heard["input_features"], ~heard["input_features_mask"])
    rows = table(inputs_embeds=found.last_hidden_state)[0]
    last = table(input_ids=torch.tensor([[size.vocab_offset + count - 1]]))[0]
    rows = torch.where(found.audio_mel_mask[0][:, None], last, rows)
    return torch.cat([rows, last.expand(188 - len(rows), -1)])


def of_dots3note(tower: SoundTower, sound: np.ndarray) -> torch.Tensor:
    """dots3 note."""
    weights, state = tower.weights(), {}
    for il in range(tower.layers):
        for tail in ("weight", "bias"):
            parts = [weights.pop(f"a.blk.{il}.ffn_{part}.{tail}") for part in ("gate", "up")]
            state[f"layers.{il}.mlp.gate_up_proj.{tail}"] = np.concatenate(parts)
    for name, value in weights.items():
        head, _, tail = name.rpartition(".")
        parts = name.split(".")
        module = DOTS3NOTE.get(head) or f"layers.{parts[2]}.{DOTS3NOTE_LAYER[parts[3]]}"
        state[f"{module}.{tail}"] = value
    size = transformers.Dots3NoteAudioConfig(
        hidden_size=tower.d,
        intermediate_size=tower.ff,
        num_hidden_layers=tower.layers,
        num_attention_heads=tower.heads,
        feature_size=tower.mel,
        downsample_hidden_size=CHANNELS,
        adapter_input_size=tower.d,
        adapter_out_dim=tower.text,
    )
    heard = Dots3NoteFeatureExtractor(feature_size=tower.mel)([sound], sampling_rate=16000)
    model = load(dots3note.Dots3NoteAudioModel(size), state)
    return model(heard["input_features"], heard["chunk_sample_lengths"]).pooler_output


MODELS: dict[str, Callable[[SoundTower, np.ndarray], torch.Tensor]] = {
    "granite_speech": of_granite,
    "granite_speech_plus": of_granite,
    "lfm2a": of_lfm2,
    "parakeet": of_parakeet,
    "parakeet_full": of_parakeet,
    "gemma3na": of_gemma3n,
    "dots3note_a": of_dots3note,
}


def main() -> None:
    """Writes the golden files."""
    GOLDENS.mkdir(exist_ok=True)
    for name, rows_of in MODELS.items():
        tower = TOWERS[name]
        with torch.no_grad():
            rows = rows_of(tower, golden_sound(name)).numpy()
        path = GOLDENS / f"{name}.npz"
        np.savez_compressed(path, n=np.int32(len(rows)), rows=rows[list(GOLDEN_ROWS)])
        print(f"{name}: {rows.shape}, |rows| {np.abs(rows).mean():.2f}, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
