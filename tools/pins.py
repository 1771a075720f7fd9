"""Write `constraints.txt` from this environment: the versions that were tested, exactly."""
from importlib.metadata import distributions
from pathlib import Path

from packaging.specifiers import SpecifierSet

OLDEST = '3.10.0'
NOT_PINNED = {'pip', 'setuptools', 'wheel', 'mmgrpo'}
HEADER = """\
# The versions that are tested, for `pip install -c constraints.txt -e .`; written by `make pins`.
# torch bears no local version here, so the CPU build and the CUDA builds of the release all fit.
"""

def pin(dist) -> str:
    "One line; a release that does not run on the oldest Python binds only the Pythons that it runs on."
    marker = '' if OLDEST in SpecifierSet(dist.metadata['Requires-Python'] or '') else ' ; python_version >= "3.11"'
    return f"{dist.metadata['Name']}=={dist.version.partition('+')[0]}{marker}"

if __name__ == '__main__':
    pins = {pin(d) for d in distributions() if d.metadata['Name'].lower() not in NOT_PINNED}
    Path('constraints.txt').write_text(HEADER + '\n'.join(sorted(pins, key=str.lower)) + '\n')
