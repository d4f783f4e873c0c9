"""``python -m jaxmp``."""

import sys

from jaxmp.cli import main

if __name__ == "__main__":
    sys.exit(main())
