"""The random conformers that tests have, and what their parts are called in transformers."""

from __future__ import annotations

from tests.cpu.media.sound_towers import SoundTower

GRANITE = {
    "chunk_size": 29,
    "conv_kernel_size": 7,
    "max_pos_emb": 40,
    "projector.window_size": 15,
    "projector.downsample_rate": 5,
    "projector.head_count": 4,
}
PLUS = {**GRANITE, "feature_layer": [0, 2]}
PARAKEET = {"conv_kernel_size": 9, "subsampling_factor": 8}
CONFORMER_TOWERS = {
    "granite_speech": SoundTower("granite_speech", ff=128, mel=64, layers=3, further=GRANITE),
    "granite_speech_plus": SoundTower("granite_speech", ff=128, mel=64, layers=3, further=PLUS),
    "lfm2a": SoundTower("lfm2a", d=512, heads=8, ff=512, mel=80),
    "parakeet": SoundTower("parakeet", mel=80, further=PARAKEET),
    "parakeet_full": SoundTower("parakeet", mel=80, further=PARAKEET),  # hears a sound whose last state is full
    "dots3note_a": SoundTower("dots3note_a", mel=40, eps=1e-6, further={}),
    "gemma3na": SoundTower("gemma3na", ff=256, mel=32, eps=1e-6),
}
CONFORMER_TEXT = {
    "granite_speech": ("", ""),
    "granite_speech_plus": ("", ""),
    "lfm2a": ("", ""),
    "parakeet": ("<so_start>", "<so_end>"),
    "parakeet_full": ("<so_start>", "<so_end>"),
    "dots3note_a": ("<|audio_comp_start|>", "<|audio_comp_end|>"),
    "gemma3na": ("\n\n<start_of_audio>", "<end_of_audio>\n\n"),
}
LIKE_TRANSFORMERS = tuple(CONFORMER_TOWERS)
PEERS = ("granite_speech", "granite_speech_plus", "lfm2a", "dots3note_a")

# Names of files -> those of transformers, of Granite Speech, its layers and its Q-Former.
GRANITE_NAMES = {
    "a.input_projection": "input_linear",
    "a.enc_ctc_out": "out",
    "a.enc_ctc_out_mid": "out_mid",
    "ffn_norm": "ff1.pre_norm",
    "ffn_up": "ff1.up_proj",
    "ffn_down": "ff1.down_proj",
    "ffn_norm_1": "ff2.pre_norm",
    "ffn_up_1": "ff2.up_proj",
    "ffn_down_1": "ff2.down_proj",
    "ln1": "attn.pre_norm",
    "attn_q": "attn.to_q",
    "attn_out": "attn.to_out",
    "attn_rel_pos_emb": "attn.rel_pos_emb",
    "norm_conv": "conv.norm",
    "conv_pw1": "conv.up_conv",
    "conv_dw": "conv.depth_conv.conv",
    "conv_norm": "conv.batch_norm",
    "conv_pw2": "conv.down_conv",
    "ln2": "post_norm",
}
GRANITE_WINDOW_NAMES = {
    "a.proj_norm": "qformer.layernorm",
    "a.proj_linear": "linear",
    "self_attn_q": "attention.attention.query",
    "self_attn_k": "attention.attention.key",
    "self_attn_v": "attention.attention.value",
    "self_attn_out": "attention.output.dense",
    "self_attn_norm": "attention.output.LayerNorm",
    "cross_attn_q": "crossattention.attention.query",
    "cross_attn_k": "crossattention.attention.key",
    "cross_attn_v": "crossattention.attention.value",
    "cross_attn_out": "crossattention.output.dense",
    "cross_attn_norm": "crossattention.output.LayerNorm",
    "ffn_up": "intermediate_query.dense",
    "ffn_down": "output_query.dense",
    "ffn_norm": "output_query.LayerNorm",
}

# Names of files -> those of Parakeet in transformers, of the encoder and of its layers.
FAST_NAMES = {
    **{f"a.conv1d.{i}": f"subsampling.layers.{i}" for i in (0, 2, 3, 5, 6)},
    "a.pre_encode.out": "subsampling.linear",
    "ffn_norm": "norm_feed_forward1",
    "ffn_up": "feed_forward1.linear1",
    "ffn_down": "feed_forward1.linear2",
    "ffn_norm_1": "norm_feed_forward2",
    "ffn_up_1": "feed_forward2.linear1",
    "ffn_down_1": "feed_forward2.linear2",
    "ln1": "norm_self_att",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "linear_pos": "self_attn.relative_k_proj",
    "norm_conv": "norm_conv",
    "conv_pw1": "conv.pointwise_conv1",
    "conv_dw": "conv.depthwise_conv",
    "conv_norm": "conv.norm",
    "conv_pw2": "conv.pointwise_conv2",
    "ln2": "norm_out",
}

# Names of files -> those of transformers, of Gemma 3n and of its layers.
GEMMA3N = {
    "a.conv1d.0": "subsample_conv_projection.conv_0.conv",
    "a.conv1d.1": "subsample_conv_projection.conv_1.conv",
    "a.conv1d.0.norm": "subsample_conv_projection.conv_0.norm",
    "a.conv1d.1.norm": "subsample_conv_projection.conv_1.norm",
    "a.pre_encode.out": "subsample_conv_projection.input_proj_linear",
}
GEMMA3N_LAYER = {
    "ffn_norm": "ffw_layer_start.pre_layer_norm",
    "ffn_up": "ffw_layer_start.ffw_layer_1",
    "ffn_down": "ffw_layer_start.ffw_layer_2",
    "ffn_post_norm": "ffw_layer_start.post_layer_norm",
    "ffn_norm_1": "ffw_layer_end.pre_layer_norm",
    "ffn_up_1": "ffw_layer_end.ffw_layer_1",
    "ffn_down_1": "ffw_layer_end.ffw_layer_2",
    "ffn_post_norm_1": "ffw_layer_end.post_layer_norm",
    "ln1": "attention.pre_attn_norm",
    "attn_q": "attention.attn.q_proj",
    "attn_k": "attention.attn.k_proj",
    "attn_v": "attention.attn.v_proj",
    "attn_out": "attention.post",
    "linear_pos": "attention.attn.relative_position_embedding.pos_proj",
    "ln2": "attention.post_norm",
    "conv_norm": "lconv1d.pre_layer_norm",
    "conv_pw1": "lconv1d.linear_start",
    "conv_dw": "lconv1d.depthwise_conv1d",
    "norm_conv": "lconv1d.conv_norm",
    "conv_pw2": "lconv1d.linear_end",
    "layer_pre_norm": "norm",
}

# Names of files -> those of transformers, of dots3 note and of its layers.
DOTS3NOTE = {
    **{f"a.conv2d.{i + 1}": f"conv_stem.convs.{i}" for i in range(3)},
    "a.conv_out": "conv_stem.conv_out",
    "a.post_ln": "layer_norm",
    "mm.a.norm_pre": "adapter.norm",
    "mm.a.mlp.1": "adapter.fc1",
    "mm.a.mlp.3": "adapter.fc2",
}
DOTS3NOTE_LAYER = {
    "ln1": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ln2": "post_attention_layernorm",
    "ffn_down": "mlp.down_proj",
}
