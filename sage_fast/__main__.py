"""`python -m sage_fast` is the command `sage-fast`."""

import sys

from sage_fast.cli import main

sys.exit(main())
