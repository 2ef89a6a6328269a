"""``python -m oracle``: the command line."""

import sys

from oracle.cli import main

sys.exit(main())
