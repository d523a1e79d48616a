"""Parts of checkpoints by the names of their tensors: the text model, encoders, what speaks."""

from __future__ import annotations

import re

THINKER = "thinker."
"""Before the names of the text model and of encoders of Omni models."""
TEXT_PART = re.compile(r"^((model\.)?(language|text)_model|llm|lfm|text_decoder)\.(model\.)?")
_ENCODERS = (
    "visual vision_tower vision_model audio_tower multi_modal_projector patch_merge_mlp vision_projection vqmodel "
    "mm_projector merger connector mlp1 embed_vision embed_audio vision_encoder audio_encoder audio_adapter "
    "vit_large_projector sam_model qwen2_model projector vit "
    "layerwise_projectors spatial_projectors sound_encoder sound_projection "
    "vision_projector vision_final_layernorm vision"
).split()
_MODULES = (
    "talker token2wav code2wav vpm resampler apm tts audio_projection_layer speech_encoder ln_speech "
    "speech_audio_adapter conformer audio_embedding depthformer depth_linear depth_embeddings"
).split()
OTHER_PARTS = re.compile(
    rf"^(model\.)?({'|'.join(_ENCODERS)})\.|^({'|'.join(_MODULES)})\."
    r"|^(model\.)?encoder\.(input_linear|out|out_mid|layers\.\d+\.(ff[12]|conv|post_norm|attn\.(pre_norm|to_|rel_pos)))"
    r"|^(codebook_offsets|audio_loss_weights)$"
    r"|^(model\.)?(image_newline|view_seperator)$|rotary(_pos)?_emb\.inv_freq$|\.(attn|attention)\.(masked_)?bias$"
)
"""Images, sound, speech, and tables that are computed anyway."""
