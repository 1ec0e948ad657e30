"""The compiled page allocator. Optional: without a C compiler the reference in Python serves."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension("agentcache.pools._pages", ["agentcache/pools/_pages.pyx"], optional=True)
    ]
)
