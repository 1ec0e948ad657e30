from agentcache.pools.pages_reference import PageAllocator as PageAllocator
from agentcache.pools.pages_reference import run_starts as run_starts
