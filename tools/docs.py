"""Make the site and the README from the notebooks as they stand: plain Markdown in between, no Quarto, no notebook run.

`docs.py` builds `_docs/`; dead links and dead anchors fail. `docs.py --readme` writes README.md from `nbs/index.ipynb`,
and with `--check` only compares. A page shows prose, exported source, examples and the outputs kept in the notebook.
"""
import ast
import base64
import json
import logging
import os
import re
import runpy
import shutil
import sys
from functools import cache
from pathlib import Path

from latex2mathml.converter import convert

ROOT = Path(__file__).resolve().parent.parent
NBS, DOCS, PAGES, README = ROOT / 'nbs', ROOT / 'docs', ROOT / '_md', ROOT / 'README.md'
NOT_SHOWN = {'hide', 'default_exp', 'include'}
EXPORTS = {'export', 'exports', 'exporti'}
MODIDX = ROOT / 'mmgrpo/_modidx.py'
STALE = 'not what nbs/index.ipynb makes; run `make export`'

DIRECTIVE = re.compile(r'^#\| *([\w-]+):? *(.*)\n?', re.M)
FENCE = re.compile(r'(^ *```.*?^ *```[ \t]*$)', re.M | re.S)
TOKEN = re.compile(r"""
    (?P<code> `[^`\n]+` )
  | \$\$ (?P<block> .+? ) \$\$
  | (?<![\\$\w]) \$ (?=\S) (?P<inline> [^$\n]+? ) (?<=\S) \$ (?![\d$])
  | \[ (?P<text> [^\]]* ) \]\( (?![a-z]+:) (?P<path> [^)\#\s]+ ) (?P<anchor> \#[^)\s]* )? \)
""", re.S | re.X)
PROMISE = re.compile(r'\A(# .*\n\s*)> (.*)$', re.M)
LATEX_REPAIRS = (
    (re.compile(r'\s+'), ' '),
    (re.compile(r'\\\\\[[\d.]+\w+\]'), r'\\\\'),     # the [2pt] after a row would be printed
    (re.compile(r'\\(log|exp|min|max)(?![a-zA-Z])(?= *(?!\\[bB]ig)\\?[a-zA-Z])'), r'\\\1\\,'),     # `log x`, not `logx`
)
MATH_TEXT = re.compile(r'(<mtext[^>]*>)(.*?)(?=</mtext>)')
BAR = '<mo stretchy="false">&#x0007C;</mo>'    # would be spaced as in "x | y" around |x| too


def page_of(nb:Path) -> str:
    "`nbs/07_loss.ipynb` is the page `loss.md`; folders are kept."
    return nb.relative_to(NBS).with_name(re.sub(r'^\d+_', '', nb.stem) + '.md').as_posix()


def notebooks() -> list[Path]:
    return [p for p in sorted(NBS.rglob('*.ipynb')) if not any(part[0] in '_.' for part in p.relative_to(NBS).parts)]


@cache
def symbols() -> dict[str, str]:
    "Where each public name that a room exports is defined: `Rollout` -> `core.md#rollout`."
    modules = runpy.run_path(str(MODIDX))['d']['syms']
    found = {name.removeprefix(module + '.'): where
             for module, names in modules.items() for name, (where, _) in names.items()}
    return {name: where.split('.html')[0] + '.md#' + name.split('.')[0].lower()
            for name, where in found.items() if not name.startswith('_')}


def mathml(latex:str, display:str) -> str:
    "MathML of an equation, with repairs before and after for what latex2mathml leaves as it is."
    def escaped(m): return m[1] + m[2].replace('\\_', '_').replace('<', '&lt;').replace('>', '&gt;')
    for pattern, repaired in LATEX_REPAIRS: latex = pattern.sub(repaired, latex)
    html = MATH_TEXT.sub(escaped, convert(latex.strip(), display=display))
    html = html.replace(BAR, BAR.replace('>', ' lspace="0" rspace="0">', 1))
    return html.replace('_', '&#95;').replace('*', '&#42;')     # Markdown would read them as emphasis


class Site:
    "How prose reads on the site: links between pages, names that link to their source, MathML instead of a script."
    images = PAGES / 'img'

    def __init__(self, source:Path, page:str):
        self.source, self.page, self.up = source, page, '../' * page.count('/')
        self.image_url = self.up + 'img/'

    def target(self, path:Path) -> str | None:
        "Where a file of the repository is on the site, or None where the site does not have it."
        if path.suffix == '.ipynb' and path.is_relative_to(NBS): return self.up + page_of(path)
        if path.is_relative_to(DOCS): return self.up + path.relative_to(DOCS).as_posix()
        return None

    def link(self, m) -> str:
        path = (self.source.parent / m['path']).resolve()
        if not path.exists(): raise SystemExit(f'{self.source.relative_to(ROOT)}: dead link to {m["path"]}')
        url = self.target(path)
        return f"[{m['text']}]({url}{m['anchor'] or ''})" if url else m['text']

    def name(self, m) -> str:
        "A room's names link to their source; on other pages a word such as `swapped` is more often a metric."
        if self.source.parent != NBS: return m['code']
        where = symbols().get(m['code'].strip('`').removesuffix('()'))
        heading = m.string[m.string.rfind('\n', 0, m.start()) + 1] == '#'
        return f"[{m['code']}]({self.up}{where})" if where and not heading else m['code']

    def math(self, m) -> str:
        "The span keeps an equation that begins a line in its paragraph, where `math` alone would end it."
        if m['block']: return f'<div class="equation">{mathml(m["block"], "block")}</div>'
        return f'<span>{mathml(m["inline"], "inline")}</span>'

    def token(self, m) -> str:
        return self.name(m) if m['code'] else self.link(m) if m['path'] else self.math(m)

    def promise(self, m) -> str: return f'{m[1]}<p class="lead" markdown="span">{m[2]}</p>'

    def prose(self, text:str) -> str:
        "Everything that differs from the notebook's Markdown; fenced code stays as it is."
        text = PROMISE.sub(self.promise, text)
        return ''.join(p if i % 2 else TOKEN.sub(self.token, p) for i, p in enumerate(FENCE.split(text)))

    def heading(self, names:list[str]) -> str:
        "A heading with an anchor for each name that a cell defines, as the links of `name` expect."
        anchors = ''.join(f'<a id="{n.lower()}"></a>' for n in names[1:])
        title = ', '.join(f'`{n}`' for n in names)
        return f'### {title} {{#{names[0].lower()}}}\n\n{anchors}'

    def save(self, file:Path, data:bytes) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)

    def result(self, text:str) -> str: return f'```{{.text .output}}\n{text.rstrip()}\n```'
    def caption(self, text:str) -> str: return f'\n\n*{text}*{{.caption}}'


class Readme(Site):
    "The same for a reader of the repository: links to files, and `$` mathematics, which the forge renders."
    images = DOCS / 'img'

    def __init__(self, check:bool):
        super().__init__(NBS / 'index.ipynb', 'index.md')
        self.image_url, self.check = 'docs/img/', check

    def save(self, file:Path, data:bytes) -> None:
        if not self.check: super().save(file, data)
        elif not file.exists() or file.read_bytes() != data: raise SystemExit(f'{file.name}: {STALE}')

    def target(self, path:Path) -> str: return path.relative_to(ROOT).as_posix()
    def name(self, m) -> str: return m[0]
    def math(self, m) -> str: return m[0]
    def promise(self, m) -> str: return f'{m[1]}{m[2]}'
    def heading(self, names:list[str]) -> str: return ''
    def result(self, text:str) -> str: return f'```text\n{text.rstrip()}\n```'
    def caption(self, text:str) -> str: return f'\n\n*{text}*'


def outputs(cell:dict, caption:str, form:Site):
    "The outputs kept in a cell, as Markdown; an error that was kept fails the build."
    for i, out in enumerate(cell['outputs']):
        data = {k: ''.join(v) for k, v in out.get('data', {}).items() if not isinstance(v, dict)}
        if out['output_type'] == 'error':
            raise SystemExit(f"{form.source.name}, cell {cell['id']}: kept an error: {out['evalue']}")
        if 'image/png' in data:
            file = form.images / f"{Path(form.page).stem}-{cell['id']}-{i}.png"
            form.save(file, base64.b64decode(data['image/png']))
            yield f'![{caption}]({form.image_url}{file.name})' + (form.caption(caption) if caption else '')
        elif 'text/markdown' in data: yield form.prose(data['text/markdown'])
        elif 'text/html' in data: yield data['text/html']
        elif 'text/plain' in data: yield form.result(data['text/plain'])
        elif out.get('name') == 'stdout': yield form.result(''.join(out['text']))


def code(cell:dict, form:Site):
    "A code cell: a heading for what it exports, the source, what it showed."
    source = ''.join(cell['source'])
    marks, source = {m[1]: m[2].strip(' "') for m in DIRECTIVE.finditer(source)}, DIRECTIVE.sub('', source).strip()
    if not source or marks.keys() & NOT_SHOWN: return
    if marks.keys() & EXPORTS:
        body = ast.parse(source).body
        if all(isinstance(n, (ast.Import, ast.ImportFrom)) for n in body): return
        names = [n.name for n in body if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and n.name[0] != '_']
        if names: yield form.heading(names)
    if marks.get('echo') != 'false': yield f'```python\n{source}\n```'
    yield from outputs(cell, marks.get('fig-cap', ''), form)


def markdown(nb:Path, form:Site) -> str:
    "A whole notebook as Markdown."
    blocks = []
    for cell in json.loads(nb.read_text())['cells']:
        if cell['cell_type'] == 'markdown': blocks.append(form.prose(''.join(cell['source'])))
        elif cell['cell_type'] == 'code': blocks += code(cell, form)
    return '\n\n'.join(b.strip() for b in blocks if b.strip()) + '\n'


def navigation(pages:dict[str, Path]) -> list:
    "Home, the numbered rooms, the tutorials, then the pages of docs/; each in the order of file names."
    def title(page): return next(iter(re.findall(r'^# (.*)$', (PAGES / page).read_text(), re.M)), page)
    number = {p: re.match(r'(\d+)_', f.name) for p, f in pages.items()}
    rooms = [{f'{n[1]} {title(p)}': p} for p, n in number.items() if n and '/' not in p]
    more = {'Tutorials': [p for p in pages if '/' in p], 'Reference': sorted(f.name for f in DOCS.glob('*.md'))}
    home = [{'Home': 'index.md'}] if 'index.md' in pages else []
    return home + [{'Rooms': rooms}] + [{k: [{title(p): p} for p in v]} for k, v in more.items() if v]


def site() -> None:
    "Write the pages and build them strictly; a warning of MkDocs is an error."
    from mkdocs.commands.build import build
    from mkdocs.config import load_config
    logging.basicConfig(format='%(levelname)s: %(message)s')
    shutil.rmtree(PAGES, ignore_errors=True)
    shutil.copytree(DOCS, PAGES)
    for file in DOCS.glob('*.md'): (PAGES / file.name).write_text(Site(file, file.name).prose(file.read_text()))
    pages = {page_of(nb): nb for nb in notebooks()}
    for page, nb in pages.items():
        (PAGES / page).parent.mkdir(exist_ok=True)
        (PAGES / page).write_text(markdown(nb, Site(nb, page)))
    build(load_config(str(ROOT / 'mkdocs.yml'), nav=navigation(pages), strict=True))
    print(f'{len(pages)} notebooks -> _docs/index.html')


def readme(check:bool) -> None:
    "Write README.md, or say that it is not what the notebook makes."
    text = markdown(NBS / 'index.ipynb', Readme(check))
    if not check: README.write_text(text)
    elif not README.exists() or README.read_text() != text: raise SystemExit(f'README.md: {STALE}')


if __name__ == '__main__':
    os.environ['NO_MKDOCS_2_WARNING'] = '1'
    if '--readme' in sys.argv: readme(check='--check' in sys.argv)
    else: site()
