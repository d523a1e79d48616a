"""`python -m ikpy`."""

import sys

from ikpy import lost_interrupts

lost_interrupts.install()
try:
    from ikpy.cli import main
except KeyboardInterrupt:  # later ones are handled there
    sys.exit(130)

sys.exit(main())
