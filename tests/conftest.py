"""One thread and a fixed order of examples: a test that passes here passes everywhere."""
import os

for name in ('OMP_NUM_THREADS', 'MKL_NUM_THREADS'): os.environ.setdefault(name, '1')    # before torch is imported

from hypothesis import settings  # noqa: E402

settings.register_profile('fixed', deadline=None, derandomize=True)
settings.load_profile('fixed')
