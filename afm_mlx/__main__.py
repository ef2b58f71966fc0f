"""`python -m afm_mlx` is the command `afm-mlx`."""

import sys

from afm_mlx.cli import main

sys.exit(main())
