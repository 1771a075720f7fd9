"""Packaging reads `settings.ini`, so names, versions and requirements are written once."""
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
parser = ConfigParser(delimiters=['='])
parser.read(HERE / 'settings.ini', encoding='utf-8')
cfg = parser['DEFAULT']
readme = HERE / 'README.md'

setup(
    name=cfg['lib_name'],
    version=cfg['version'],
    description=cfg['description'],
    long_description=readme.read_text(encoding='utf-8') if readme.exists() else cfg['description'],
    long_description_content_type='text/markdown',
    author=cfg['author'],
    license='Apache-2.0',
    keywords=cfg['keywords'],
    packages=find_packages(include=[cfg['lib_name'], cfg['lib_name'] + '.*']),
    include_package_data=True,
    package_data={cfg['lib_name']: ['assets/**', 'configs/**']},
    python_requires='>=' + cfg['min_python'],
    install_requires=cfg['requirements'].split(),
    extras_require={name: cfg[f'{name}_requirements'].split() for name in ('math', 'dev')},
    entry_points={
        'console_scripts': cfg['console_scripts'].split(),
        'nbdev': [f"{cfg['lib_name']}={cfg['lib_path']}._modidx:d"],
    },
    zip_safe=False,
)
