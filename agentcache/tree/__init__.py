"""The radix tree: prefix identity over token ids, integers only."""
