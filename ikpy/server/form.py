"""Requests whose body is a form with files (multipart/form-data, RFC 7578)."""

from __future__ import annotations

from email.message import Message

from ikpy.server.errors import bad_request

MOST_PARTS = 64
LONGEST_HEAD = 8192
"""Bytes before the content of a part, and of a content type: reading parameters takes the square of their number."""
LINE = b"\r\n"


def is_form(content_type: str) -> bool:
    """Whether a body is a form."""
    return content_type.lower().startswith("multipart/form-data")


def read_form(content_type: str, body: bytes) -> dict[str, bytes]:
    """The fields of a form; of several with one name the last. Raises ApiError 400."""
    boundary = _parameter("content-type", content_type[:LONGEST_HEAD], "boundary")
    if not is_form(content_type) or not boundary:
        raise bad_request("the request body must be a form: multipart/form-data")
    mark = LINE + b"--" + boundary.encode("utf-8", "replace")
    first, *parts = (LINE + body).split(mark, MOST_PARTS + 1)
    if first.strip() or not parts or len(parts) > MOST_PARTS or not parts[-1].startswith(b"--"):
        raise bad_request(f"the request body is no whole form of at most {MOST_PARTS - 1} fields")
    fields = {}
    for part in parts[:-1]:
        head, separator, content = part.removeprefix(LINE).partition(2 * LINE)
        if not separator or len(head) > LONGEST_HEAD or not (name := _name(head)):
            raise bad_request("a field of the form has no name")
        fields[name] = content
    return fields


def _name(head: bytes) -> str:
    """Name of the field with these header lines."""
    for line in head.decode("utf-8", "replace").split("\r\n"):
        header, _, value = line.partition(":")
        if header.strip().lower() == "content-disposition":
            return _parameter("content-disposition", value.strip(), "name")
    return ""


def _parameter(header: str, value: str, name: str) -> str:
    """A parameter of a header line, empty if it is not there."""
    message = Message()
    message[header] = "".join(value.splitlines())
    found = message.get_param(name, "", header)
    return found if isinstance(found, str) else ""
