"""`python -m pdserve.bench.transport`."""

import sys

from pdserve.bench.transport.cli import main

if __name__ == "__main__":
    sys.exit(main())
