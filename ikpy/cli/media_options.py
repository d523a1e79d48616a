"""Options about pictures and sounds."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class MediaOptions:
    """Pictures and sounds: the projector that encodes them, and where they are.

    use_projector: False takes none, True also one that lies in the folder of the model. offload, device: as of
    `encoder_device`.
    """

    projector: str | None = None
    url: str | None = None
    use_projector: bool | None = None
    files: list[str] = field(default_factory=list)
    min_tokens: int | None = None
    max_tokens: int | None = None
    n_threads: int | None = None
    folder: str | None = None
    offload: bool | None = None
    device: str | None = None
