"""Chat templates of a checkpoint, or of a file in their place, as `tokenizer.chat_template*` keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ikpy.convert.checkpoint import Checkpoint
from ikpy.errors import FileFormatError, UsageError
from ikpy.vocab import ChatTemplate


def given_template(path: str) -> dict[str, Any]:
    """Keys of the one template in a file of jinja2 text; FileFormatError where it cannot be compiled."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        ChatTemplate(text)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except (UnicodeDecodeError, FileFormatError) as error:
        raise FileFormatError(f"{path}: {error}") from None
    return {"tokenizer.chat_template": text}


def checkpoint_templates(checkpoint: Checkpoint) -> dict[str, Any]:
    """Keys of all templates that a checkpoint brings: one, or several with names. Empty if it has none."""
    template = checkpoint.text("chat_template.jinja")
    template = template or checkpoint.json("tokenizer_config.json").get("chat_template")
    template = template or checkpoint.json("chat_template.json").get("chat_template")
    further = checkpoint.texts("additional_chat_templates", ".jinja")
    if not template and not further:
        return {}
    if isinstance(template, str) and not further:
        return {"tokenizer.chat_template": template}
    entries = [{"name": "default", "template": template}] if isinstance(template, str) else template or []
    named = {str(entry["name"]): str(entry["template"]) for entry in entries} | further
    keys: dict[str, Any] = {f"tokenizer.chat_template.{name}": text for name, text in named.items()}
    keys["tokenizer.chat_templates"] = list(named)
    keys["tokenizer.chat_template"] = keys.pop("tokenizer.chat_template.default", next(iter(named.values())))
    return keys
