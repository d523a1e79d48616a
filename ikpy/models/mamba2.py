"""mamba2: Mamba-2 alone (arXiv:2405.21060), such as Codestral Mamba."""

from __future__ import annotations

from ikpy.models.nemotron_h import NemotronH


class Mamba2Model(NemotronH):
    """Every layer is recurrent: files count no heads and no network."""
