"""The compiled parts. Optional: without a C compiler their references in Python serve.

`_rows` is compiled for OpenMP but linked to no library of it: it takes the one that torch brings,
so that both share one team of threads. On x86-64 it is for processors with AVX2; whoever imports it
looks first.
"""

import platform
import sys

from setuptools import Extension, setup

_IS_X86_64 = sys.platform == "linux" and platform.machine() == "x86_64"

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
            extra_compile_args=[
                "-O3",
                "-fopenmp",
                "-Wno-psabi",
                *(["-march=x86-64-v3"] if _IS_X86_64 else []),
            ],
            libraries=["m"],
            optional=True,
        ),
    ]
)
