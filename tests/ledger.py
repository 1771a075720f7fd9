"""What the fault tests of a pytest session injected, and the record that several sessions can add up to."""
import json
import os
import platform
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

TORTURE = os.environ.get('MMGRPO_TORTURE', '') not in ('', '0')    # the nightly size
SHARE = float(os.environ.get('MMGRPO_TORTURE_SHARE', '1'))         # of it; above 1 is more
PIECE = os.environ.get('MMGRPO_TORTURE_PIECE', '1/1')              # which part of the cases: '2/5'


def size(small:int, large:int) -> int:
    "A number of cases: what every check of a change does, or what the nightly run does."
    return max(1, round(large * SHARE)) if TORTURE else small


def of_piece(cases:list) -> list:
    "The share of the cases that is this session's."
    number, of = map(int, PIECE.split('/'))
    return cases[number - 1::of]


@dataclass
class Entry:
    "What one test function did."
    goal:str
    about:str
    cases:int = 0
    failed:int = 0
    skipped:int = 0
    seconds:float = 0.
    wrong:int = 0
    faults:Counter = field(default_factory=Counter)


class Ledger:
    "Counts faults by the test that injected them."
    def __init__(self): self.entries, self.figures, self.processes, self.wrong, self.test = {}, {}, 0, [], None

    def begin(self, name, goal, about) -> None:
        self.test = self.entries.setdefault(name, Entry(goal, about))

    def fault(self, kind:str, n:int=1) -> None:
        "Count faults that were injected."
        self.test.faults[kind] += n

    def judge(self, kind:str, what, found:dict, wanted:dict, faults:int=1) -> None:
        "Count faults; what was made of them must be what is wanted."
        self.fault(kind, faults)
        if found == wanted: return
        self.test.wrong += 1
        self.wrong.append(f'{kind}: {what}')
        names = found.keys() ^ wanted.keys() | {key for key in found.keys() & wanted.keys() if found[key] != wanted[key]}
        raise AssertionError(f'{kind} of {what}: {sorted(names)} differ')

    def line(self) -> str:
        "The headline; empty when there was no fault."
        kinds = sum((entry.faults for entry in self.entries.values()), Counter())
        if not kinds: return ''
        told = ', '.join(f'{n:,} {kind}' for kind, n in sorted(kinds.items()))
        return f'faults injected: {sum(kinds.values()):,} ({told}) in {self.processes:,} processes; wrong resumes: {len(self.wrong)}'

    def write(self, path) -> None:
        "Add this session to a record; what the same piece of a test said before is replaced."
        path = Path(path)
        record = json.loads(path.read_text()) if path.exists() else dict(tests={}, figures={})
        for name, entry in self.entries.items():
            if not entry.goal: continue
            held = record['tests'].get(name, {})
            pieces = {p: was for p, was in held.get('pieces', {}).items() if p.partition('/')[2] == PIECE.partition('/')[2]}
            found = {key: value for key, value in vars(entry).items() if key not in ('goal', 'about')}
            pieces[PIECE] = found | dict(faults=dict(sorted(entry.faults.items())), seconds=round(entry.seconds, 1))
            record['tests'][name] = dict(goal=entry.goal, about=entry.about, pieces=dict(sorted(pieces.items())))
        record['figures'] |= self.figures
        record['machine'] = machine()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1, sort_keys=True) + '\n')


def machine() -> dict:
    "Where this runs, without names."
    import torch
    cpuinfo = Path('/proc/cpuinfo')
    model = next((line.partition(':')[2].strip() for line in cpuinfo.read_text().splitlines() if line.startswith('model name')), '') \
        if cpuinfo.exists() else platform.machine()
    return dict(cpu=model, cores=os.cpu_count(), threads=1, system=platform.system(), python=platform.python_version(), torch=torch.__version__)
