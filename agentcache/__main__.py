"""`python -m agentcache`, the same as the `agentcache` command."""

import sys

from agentcache.cli import main

if __name__ == "__main__":
    sys.exit(main())
