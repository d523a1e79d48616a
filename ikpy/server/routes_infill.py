"""Infill: text between a beginning and an end, for editors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from ikpy.server.errors import ApiError, bad_request
from ikpy.server.front import Front
from ikpy.server.http import aside, read_body
from ikpy.server.prompts import Prompt
from ikpy.server.routes_native import answer_prompts
from ikpy.server.routes_status import front_of

if TYPE_CHECKING:
    from ikpy.vocab import Vocab

INFILL_TEXTS = ("input_prefix", "input_suffix", "prompt")
SUFFIX_SHARE = 4


async def infill(request: Request) -> Response:
    """POST /infill: text between a prefix and a suffix."""
    front = front_of(request)
    body = await read_body(request, front.settings)
    params = await aside(request, front.read_params, body)
    n_room = room_beside(params.limit, front.n_ctx_slot)
    prompt = await aside(request, infill_prompt, front, body, n_room)
    return await answer_prompts(request, front, [prompt], params, several=False)


def room_beside(limit: int, n_ctx: int) -> int:
    """Tokens of a prompt that leave room for an answer: its limit, at most half of the context; a quarter without."""
    return n_ctx - 1 - (min(limit, n_ctx // 2) if limit >= 0 else n_ctx // 4)


def infill_prompt(front: Front, body: dict[str, Any], n_room: int) -> Prompt:
    """Fill-in-the-middle tokens around prefix and suffix, and behind them the ``prompt``, the text that the answer
    goes on with (editors send the line up to the cursor).

    If that takes more than ``n_room`` tokens, what is nearest to the gap stays, of the suffix a quarter if the prefix
    needs the rest, and of other files the last ones as far as they fit. Raises ApiError 501 for a model without such
    tokens.
    """
    vocab = front.vocab
    if vocab.fim_pre is None or vocab.fim_suf is None or vocab.fim_mid is None:
        raise ApiError(501, "This model does not support infill: its vocabulary has no fill-in-the-middle tokens")
    before, after, line = (vocab.tokenize(text_field(body, name), add_special=False) for name in INFILL_TEXTS)
    begin = [vocab.bos] if vocab.add_bos and vocab.bos is not None else []
    n_left = max(0, n_room - len(begin) - len(INFILL_TEXTS) - len(line))
    n_after = min(len(after), max(n_left // SUFFIX_SHARE, n_left - len(before)))
    n_before = min(len(before), n_left - n_after)
    files = extra_files(vocab, body, n_left - n_before - n_after)
    prefix = [vocab.fim_pre, *before[len(before) - n_before :]]
    suffix = [vocab.fim_suf, *after[:n_after]]
    parts = suffix + prefix if front.settings.spm_infill else prefix + suffix
    return Prompt([*begin, *files, *parts, vocab.fim_mid, *line], text_field(body, INFILL_TEXTS[0]))


def text_field(body: dict[str, Any], name: str) -> str:
    """A text of a request, empty if it is missing. Raises ApiError 400."""
    text = body.get(name)
    if not isinstance(text, str | None):
        raise bad_request(f'"{name}" must be a string')
    return text or ""


def extra_files(vocab: Vocab, body: dict[str, Any], n_room: int) -> list[int]:
    """Tokens of names and texts of ``input_extra``: of the last files that have room, in the frame of a repository that
    models with such tokens know. Raises ApiError 400."""
    extra = body.get("input_extra") or []
    if not isinstance(extra, list) or not all(isinstance(item, dict) for item in extra):
        raise bad_request('"input_extra" must be an array of objects with filename and text')
    if not all(isinstance(item.get("text"), str) and isinstance(item.get("filename", ""), str) for item in extra):
        raise bad_request('"input_extra": "text" of every file must be a string, and "filename" one if it is given')
    repository = [] if vocab.fim_rep is None else [vocab.fim_rep, *vocab.tokenize("myproject\n", add_special=False)]
    mark = [] if vocab.fim_sep is None else [vocab.fim_sep]
    present = [*mark, *vocab.tokenize("filename\n", add_special=False)] if mark else []
    n_room -= len(repository) + len(present)
    found: list[int] = []
    for item in reversed(extra):
        text = f"{item.get('filename', 'tmp')}\n{item.get('text', '')}\n"
        tokens = [*mark, *vocab.tokenize(text, add_special=False), *found]
        if len(tokens) > n_room:
            break
        found = tokens
    return [*repository, *found, *present] if found else []
