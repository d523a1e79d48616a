"""Options of pictures and sounds."""

from ikpy.cli import values
from ikpy.cli.options import FLAG, NO_GPU, OFF, PATH, TEXT, Kind, ignored, option, refused

SC = "SC"
NO_VIDEO = "video is not supported, only pictures and sounds"
ROWS = Kind("N", values.bounded(1))

MULTIMODAL_ROWS = (
    option(
        "-mm --mmproj",
        PATH,
        "media.projector",
        "projector file, with which prompts may have pictures or sounds",
        SC,
        env="LLAMA_ARG_MMPROJ",
    ),
    option("-mmu --mmproj-url", TEXT, "media.url", "URL of the projector file", SC, env="LLAMA_ARG_MMPROJ_URL"),
    option(
        "--mmproj-auto",
        FLAG,
        "media.use_projector",
        "use the projector beside the model: always for -hf, with this option also in the folder of -m",
        SC,
        env="LLAMA_ARG_MMPROJ_AUTO",
    ),
    option("--no-mmproj --no-mmproj-auto", OFF, "media.use_projector", "no projector", SC),
    option(
        "--mmproj-offload",
        FLAG,
        "media.offload",
        "encode pictures and sounds on the first GPU, or that of -mg; default: where GPUs are used",
        SC,
        reason=NO_GPU,
        env="LLAMA_ARG_MMPROJ_OFFLOAD",
    ),
    option("--no-mmproj-offload", OFF, "media.offload", "encode pictures and sounds on the CPU", SC),
    option(
        "-mmdev --mmproj-device",
        Kind("CUDA0|none"),
        "media.device",
        "GPU that encodes pictures and sounds, none for the CPU",
        SC,
        reason=NO_GPU,
        quiet="none",
    ),
    option(
        "--image --audio",
        Kind("FILE", values.to_list, many=True),
        "media.files",
        "picture or sound of the first message, or several with commas between. Repeatable",
        "C",
    ),
    refused("--video", NO_VIDEO, "film", SC, PATH),
    option(
        "--image-min-tokens",
        ROWS,
        "media.min_tokens",
        "least tokens of a picture, for projectors that keep its proportions",
        SC,
        env="LLAMA_ARG_IMAGE_MIN_TOKENS",
    ),
    option(
        "--image-max-tokens",
        ROWS,
        "media.max_tokens",
        "most tokens of a picture, for projectors that keep its proportions",
        SC,
        env="LLAMA_ARG_IMAGE_MAX_TOKENS",
    ),
    option(
        "-tm --threads-mtmd",
        Kind("N", values.to_threads),
        "media.n_threads",
        "threads that encode pictures and sounds; default: as -tb",
        SC,
    ),
    ignored("--mtmd-batch-max-tokens", "all are encoded one by one", "tokens encoded at once", SC, TEXT),
    ignored("--video-fps --video-timestamp-interval --video-ffmpeg-dir", NO_VIDEO, "frames of a film", SC, TEXT),
    ignored("--mtmd-kq-type", "attention scores of encoders are F32", "type of attention scores", SC, TEXT),
)
