"""What a server is started with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ikpy import __version__
from ikpy.engine.prefix import PROMPT_TAIL
from ikpy.engine.sampling import SamplingParams

REASONING_FORMATS = ("none", "auto", "deepseek", "deepseek-legacy")

BUILD = f"ikpy-{__version__}"
"""What answers call the program."""


@dataclass
class ServerSettings:
    """Behaviour of the server apart from model and context.

    ``alias`` is the model's name in answers, ``n_predict`` and ``n_keep`` are defaults of requests (tokens),
    ``queue_limit`` is the number of requests that may wait for a slot, ``max_body`` the bytes of a request body,
    ``timeout`` the seconds a client may take to send or read, ``context_shift`` allows dropping old tokens of a full
    context. ``cache_reuse`` is the least length in tokens of a piece of a slot's text that is moved to where a prompt
    has it (0: none is). ``cache_ram`` is the limit of saved texts in host memory in bytes (-1: none), which are made
    when a request would keep less than the share ``cache_ram_similarity`` of a slot's text of at least
    ``cache_ram_n_min`` tokens. ``ctx_checkpoints`` is the most checkpoints of a slot's recurrent states (0: none); they
    are made every ``ctx_checkpoints_interval`` tokens (0: not so) and ``ctx_checkpoints_tolerance`` tokens before the
    end of a prompt. ``api_keys`` gives the name of every key. ``slot_autosave`` keeps slots over a restart.
    ``api_prefix`` is the beginning of all paths, ``change_props`` allows POST /props.
    ``cors`` are the origins whose pages may use the server ("*": all; None: all without keys, none with keys),
    ``control_vectors`` the files of control vectors that requests may name, beside those in ``slot_save_path``.
    ``reasoning_effort`` is the template's variable for requests that do not set it ("default": the template's own),
    ``reasoning_budget`` is the most tokens of reasoning (-1: no limit), ``reasoning_budget_message`` a text that is
    written when they are used up.
    ``banned_strings`` may not appear in answers to requests that give none, ``banned_n`` of their tokens are banned.
    ``spm_infill`` puts the suffix of /infill before its prefix, which some models were trained with.
    ``media_path`` is the folder of pictures that requests name as ``file://`` addresses (None: they are refused),
    ``downloads`` allows pictures from other hosts.
    ``max_token_delay`` is the time in seconds that a batch of prompt tokens may keep running answers waiting.
    ``ping_interval`` is the time in seconds without an event after which streams get a line for nobody (0: never).
    """

    alias: str = "default"
    model_path: str = ""
    n_slots: int = 1
    n_predict: int = -1
    n_keep: int = 0
    stop: tuple[str, ...] = ()
    banned_strings: tuple[str, ...] = ()
    banned_n: int = 1
    special: bool = False
    sampling: SamplingParams = field(default_factory=SamplingParams)
    default_samplers: bool = True
    slot_prompt_similarity: float = 0.1
    cont_batching: bool = True
    context_shift: bool = True
    queue_limit: int = 512
    max_token_delay: float = 0.5
    ping_interval: float = 30.0
    cache_reuse: int = 0
    cache_ram: int = 8192 << 20
    cache_ram_similarity: float = 0.5
    cache_ram_n_min: int = 0
    ctx_checkpoints: int = 32
    ctx_checkpoints_interval: int = 512
    ctx_checkpoints_tolerance: int = PROMPT_TAIL
    max_body: int = 64 << 20
    api_keys: Mapping[str, str] = field(default_factory=dict)
    api_prefix: str = ""
    change_props: bool = False
    cors: tuple[str, ...] | None = None
    control_vectors: tuple[str, ...] = ()
    metrics: bool = False
    slots: bool = True
    slot_save_path: str | None = None
    slot_autosave: bool = False
    webui: bool = True
    static_path: str | None = None
    cache_prompt: bool = True
    embeddings: bool = False
    pooling: str = "none"
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    reasoning_format: str = "deepseek"
    reasoning: str = "auto"
    reasoning_effort: str = "default"
    reasoning_budget: int = -1
    reasoning_budget_message: str = ""
    prefill_assistant: bool = True
    parallel_tool_calls: bool = False
    skip_chat_parsing: bool = False
    spm_infill: bool = False
    timeout: float = 600.0
    media_path: str | None = None
    downloads: bool = True
