"""What every test runs under: no network, few threads, generated files of its own, the same
examples each time."""

import atexit
import os
import shutil
import tempfile

from hypothesis import settings

# set before any test imports torch or transformers, which read them once
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
os.environ.setdefault("OMP_NUM_THREADS", str(min(2, os.cpu_count() or 1)))

if "PYTEST_XDIST_WORKER" not in os.environ:  # workers share what their controller has set
    os.environ["AGENTCACHE_HOME"] = tempfile.mkdtemp(prefix="agentcache-tests-")
    atexit.register(shutil.rmtree, os.environ["AGENTCACHE_HOME"], ignore_errors=True)

# `pytest --hypothesis-profile=explore` draws new examples, and more of them
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile("repeatable")
