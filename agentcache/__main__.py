"""`python -m agentcache`, the same as the `agentcache` command."""

from agentcache.cli import main

if __name__ == "__main__":
    main()
