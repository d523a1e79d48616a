"""`python -m ikpy`."""

import sys

from ikpy.cli import main

sys.exit(main())
