"""`python -m ikpy`."""

import sys

try:
    from ikpy.cli import main
except KeyboardInterrupt:  # later ones are handled there
    sys.exit(130)

sys.exit(main())
