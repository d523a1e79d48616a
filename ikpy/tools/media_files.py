"""Pictures and sounds from files of either kind."""

from __future__ import annotations

from ikpy.errors import FileFormatError
from ikpy.sound.samples import FORMATS as SOUND_FORMATS
from ikpy.sound.samples import is_sound
from ikpy.tools.media import Media, read_media_file
from ikpy.tools.pictures import Picture
from ikpy.tools.sounds import Sound


def media_of_file(data: bytes, name: str = "") -> Media:
    """The sound of a file's content if it begins as one, else the picture. Raises an IkpyError that calls it by the
    name."""
    if is_sound(data):
        return Sound.of_file(data, name)
    from ikpy.vision.images import FORMATS, UnknownFormatError

    try:
        return Picture.of_file(data, name)
    except UnknownFormatError:
        known = ", ".join((*FORMATS, *SOUND_FORMATS))
        raise FileFormatError(f"{name or 'it'} is no picture or sound of a known format ({known})") from None


def read_media(path: str) -> Media:
    """The picture or the sound in a file. Raises an IkpyError that names it."""
    return media_of_file(read_media_file(path), path)
