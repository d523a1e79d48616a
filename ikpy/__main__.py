"""`python -m ikpy`, and the program `ikpy`."""

import sys

from ikpy.signals import lost_interrupts

INTERRUPTED = 130


def main() -> int:
    """Run the command line; returns the exit status. Its import takes a part of a second, in which Ctrl-C may come."""
    lost_interrupts.install()
    try:
        from ikpy.cli import main as run

        return run()
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        if isinstance(error.__cause__, KeyboardInterrupt):  # the interpreter wraps what comes while a class is made
            return INTERRUPTED
        raise


if __name__ == "__main__":
    sys.exit(main())
