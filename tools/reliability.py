"""The page on reliability, `docs/reliability.md`, from the record of a run of the fault tests: no figure in it is typed by hand.

  python tools/reliability.py           write the page from docs/results/torture.json, which `make torture` leaves
  python tools/reliability.py --check   fail if the page is not what the record says"""
import argparse, json, sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORD, PAGE = ROOT / 'docs' / 'results' / 'torture.json', ROOT / 'docs' / 'reliability.md'

GOALS = {
    'R1': ('killed at random instants, up to five times a run', 'final adapter, moments, order of puzzles and log are those of the undisturbed run'),
    'R2': ('a fault at every call of the disk, also by the kernel', 'the old state is kept, the error names the place, a rerun is identical'),
    'R3': ('a power cut: what was not synced is lost, zeroed or reordered', 'never loads anything wrong; goes on from the last durable checkpoint'),
    'R4': ('tampering with every file of a run', 'refused, naming the file'),
    'R5': ('several processes start the same run at the same instant', 'one wins; the others leave within 5 s without a byte written'),
    'R6': ('hostile input: pickles, huge headers, nested JSON, paths that lead outside', 'nothing is executed, nothing outside the run is read'),
    'R7': ('NaN and infinities in logits, losses, gradients, rewards', 'such updates move no weight; too many end the run for good'),
    'R8': ('one of several ranks fails', 'all ranks end; the run goes on from its checkpoint'),
    'R9': ('SIGTERM, SIGINT and SIGUSR1 at random instants, also twice', 'a clean stop; a rerun is identical'),
    'R10': ('full disks of all sizes', 'the newest checkpoint is never lost; with more room a rerun is identical'),
    'R11': ('the log torn at every byte of its last records', 'every update has exactly one line'),
    'R12': ('saved, measured, drawn and restarted at other times', 'the same adapter, moments and log'),
    'R13': ('something that the numbers depend on is changed', 'refused unless declared'),
    'R14': ('umask, clock, times of files, TMPDIR, copies, read-only and linked folders', 'as if nothing had happened, or refused with a reason'),
    'R15': ('rewards that time out, fail, are slow or no number', 'never taken for a number'),
    'cost': ('what safety costs: checkpoints, starts, long logs, kills', 'see the figures below')}

def table(head:list[str], rows:list[list[str]]) -> str:
    "A Markdown table."
    return '\n'.join('| ' + ' | '.join(row) + ' |' for row in [head, ['---'] * len(head), *rows])

def total(tests:list[dict]) -> dict:
    "The sums over all pieces of some tests."
    pieces = [piece for test in tests for piece in test['pieces'].values()]
    sums = {key: sum(piece[key] for piece in pieces) for key in ('cases', 'failed', 'skipped', 'wrong', 'seconds')}
    return sums | dict(faults=sum((Counter(piece['faults']) for piece in pieces), Counter()))

def goals(record:dict) -> str:
    "One row a goal."
    rows = []
    for goal, (done, promise) in GOALS.items():
        found = total([test for test in record['tests'].values() if test['goal'] == goal])
        figures = [f'{found["cases"]:,}', f'{sum(found["faults"].values()):,}', f'{found["wrong"]:,}', f'{found["failed"]:,}', f'{found["seconds"]:,.0f}']
        rows.append([goal, done, promise, *(figures if found['cases'] else ['–'] * 5)])
    return table(['', 'what is done to a run', 'what must follow', 'cases', 'faults', 'wrong resumes', 'failed', 'seconds'], rows)

def tests(record:dict) -> str:
    "One row a test."
    rows = []
    for name, test in sorted(record['tests'].items(), key=lambda item: (list(GOALS).index(item[1]['goal']), item[0])):
        found = total([test])
        kinds = ', '.join(f'{n:,} {kind}' for kind, n in sorted(found['faults'].items())) or '–'
        rows.append([test['goal'], f'`{name}`', test['about'], f'{found["cases"]:,}', kinds])
    return table(['', 'test', 'in words', 'cases', 'faults'], rows)

def page(record:dict) -> str:
    "The whole page."
    unknown = {test['goal'] for test in record['tests'].values()} - GOALS.keys()
    if unknown: sys.exit(f'{RECORD.name}: no goal is called {min(unknown)}')
    found, m = total(list(record['tests'].values())), record['machine']
    forged = sum(total([test for test in record['tests'].values() if test['goal'] == 'R6'])['faults'].values())
    rows = [[name, f'{value:g}'] for name, value in sorted(record['figures'].items())]
    figures = table(['figure', 'value'], rows) if rows else 'None were taken for this record: `tests/test_cost.py` takes them at full size.'
    return f'''# Reliability

**{sum(found['faults'].values()):,} faults injected, {found['wrong']:,} wrong resumes.** A resume is wrong when anything differs from the run that nobody disturbed: the
adapter, the optimizer's moments, the order of puzzles, a line of the log (without its clocks), a report, a picture, a point of a curve.
{forged:,} of the faults are forged or random content, R6, which is read and refused; no run is trained on it.

This page is written by `tools/reliability.py` from the record that the fault tests left in `docs/results/torture.json`; `make test` fails if it
says anything else. The tests start the real `mmgrpo_train` on a tiny model, in processes forked from a warm one and in cold ones. The column
"cases" tells how many were run for this record, which may be the sample of `make test` or more; – is what was not run for it.

{goals(record)}

Measured on {m['cores']} cores ({m['cpu']}), {m['threads']} thread a process, {m['system']}, Python {m['python']}, torch {m['torch']}.

## Figures

Times were taken on a shared machine; goodput is the time of the updates of an undisturbed run, divided by all the time that a killed one took.

{figures}

## The tests

{tests(record)}

## Run them

`make test` runs a sample of each; its last line says how many faults it injected. `make torture` runs them all, writes the record and this page.
`MMGRPO_TORTURE_SHARE=0.1 make torture` runs a tenth of the random ones, `MMGRPO_TORTURE_PIECE=2/5 make torture` the second fifth of all cases
(five such runs add up to one record), and `TORTURE=tests/test_kills.py make torture` those of one file.
'''

if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--check', action='store_true')
    args = parser.parse_args()
    text = page(json.loads(RECORD.read_text()))
    if args.check: sys.exit(0 if text == PAGE.read_text() else f'{PAGE.name} is not what the record says; run tools/reliability.py')
    PAGE.write_text(text)
