"""The compiled parts. Optional: without a C compiler their references in Python serve.

`_rows` is compiled for OpenMP but linked to no library of it: it takes the one that torch brings,
so that both share one team of threads.
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension("agentcache.pools._pages", ["agentcache/pools/_pages.pyx"], optional=True),
        Extension(
            "agentcache.kernels._rows",
            ["agentcache/kernels/_rows.pyx"],
            depends=[
                f"agentcache/kernels/_rows{part}.h"
                for part in ("", "_gates", "_mixers", "_experts", "_attention", "_latent", "_moves")
            ],
            extra_compile_args=["-O3", "-fopenmp", "-Wno-psabi"],
            libraries=["m"],
            optional=True,
        ),
    ]
)
