"""Locks of files between processes."""

from __future__ import annotations

import errno
import fcntl

# File systems without locks: Lustre and NFS as some mount them, some of FUSE.
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


def lock_file(descriptor: int, operation: int) -> None:
    """`fcntl.flock`, without effect on file systems that know no locks. BlockingIOError as there."""
    try:
        fcntl.flock(descriptor, operation)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
