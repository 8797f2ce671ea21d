"""`python -m sage_fast` is the command `sage-fast`."""

import sys

from sage_fast.commands.cli import main

sys.exit(main())
