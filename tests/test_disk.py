"""A disk that says no, at every call that a run makes of it: the run ends with a line that names the place, or does without; nothing is lost."""
import errno
import os
import random
import re
import shutil
import signal
import subprocess
from collections import Counter

import pytest
from faults import CALLS, copied, follows, goes_on, keeps, outcome
from ledger import TORTURE, size

SILENT = ('open', 'write', 'fsync', 'truncate', 'close')    # the interpreter goes on after EINTR in these by itself: see the strace tests
ERRORS = ('EIO', 'ENOSPC', 'EDQUOT')


def points(trace) -> dict:
    "place -> number of the call: the first of each kind of call on each kind of file, however many updates and random names there were."
    found, seen = {}, {}
    for number, line in enumerate(trace, 1):
        name, _, path = line.partition(' ')
        plain = re.sub(r'\d+', '#', re.sub(r'-[0-9a-f]{8}(?=$|/)', '-*', path.rpartition('/run')[2] if '/run' in path else '..'))
        of_file = seen.setdefault(path, []).append(name) or seen[path].count(name)
        found.setdefault(f'{name} {plain or "/"} {of_file if of_file < 3 else "more"}', number)
    return found


@pytest.fixture(scope='session')
def stages(trials, brief, tmp_path_factory):
    "Two processes that make a run: what the first finds and does, and the second."
    found, place = [], tmp_path_factory.mktemp('stages')
    for stop in (1, None):
        before = place/f'before-{stop}'/'run'
        if found: shutil.copytree(place/'run', before)
        found.append((before, stop, trials.ended(place/'run', brief.sections, stop=stop).trace))
    assert outcome(place/'run') == brief.found
    return found


def cases(stages) -> list:
    "(stage, number of the call, its place, kind of fault), all that can be."
    found = []
    for number, (_, _, trace) in enumerate(stages):
        for place, at in points(trace).items():
            name = place.split()[0]
            kinds = ['kill before', 'kill after', *ERRORS] + ['short'] * (name == 'write') + ['EINTR'] * (name not in SILENT)
            found += [(number, at, place, kind) for kind in kinds]
    return found


def some_of_each(all_cases, n) -> list:
    "A few cases of every kind of fault."
    kinds = sorted({kind for *_, kind in all_cases})
    return [case for kind in kinds for case in random.Random(kind).sample([case for case in all_cases if case[-1] == kind], n)]


def prepared(stage, place):
    "A directory as a stage finds it."
    place.mkdir(parents=True, exist_ok=True)
    return copied(stage[0], place) if stage[0].exists() else place/'run'


def suffer(trials, brief, stages, case, place, then=None) -> None:
    "Let one fault happen, see that nothing is lost, and go on."
    number, at, what, kind = case
    run = prepared(stages[number], place)
    life = trials.live(run, brief.sections, stop=stages[number][1], call=dict(at=at, kind=kind, then=then))
    follows(life, brief)
    if kind.startswith('kill'): assert life.code == -signal.SIGKILL, (what, life.err)
    elif kind == 'short': assert life.code == 0, (what, life.err)
    elif life.code: assert_told(life, run, [kind, *then[1:]] if then else [kind], what)
    if run.exists() and (run/'checkpoints').exists(): keeps(life, run)
    goes_on(trials, brief, run, kind)
    shutil.rmtree(place)


def problems(suffer_one, mine, place) -> str:
    "What goes wrong in each of these cases, one after the other."
    found = []
    for n, case in enumerate(mine):
        try: suffer_one(case, place/str(n))
        except AssertionError as error: found.append(f'{case}: {error}')
    return '\n'.join(found)


def assert_told(life, run, kinds, what) -> None:
    "One line, which names a place that the user knows and the reason: that of the first call which the run could not do without."
    reasons = [os.strerror(getattr(errno, kind)) for kind in kinds]
    assert life.code == 1 and len(life.err.splitlines()) == 1, (what, life.code, life.err)
    assert str(run.parent) in life.err and any(reason in life.err for reason in reasons) and '.tmp-' not in life.err, (what, life.err)


# --- through the seam

@pytest.mark.goal('R2')
@pytest.mark.parametrize('part', range(size(1, 20)))
def test_a_fault_at_every_call_of_the_disk(trials, brief, stages, tmp_path, part):
    "First commit, rolling commit with pruning, log, report, pictures, adapter, summary: each call fails, does half, or is the last."
    all_cases = cases(stages)
    assert {what.split()[0] for _, _, what, _ in all_cases} >= set(CALLS) - {'truncate'}
    mine = all_cases[part::20] if TORTURE else some_of_each(all_cases, 4)
    told = problems(lambda case, place: suffer(trials, brief, stages, case, place), mine, tmp_path)
    assert not told, told


@pytest.mark.goal('R2')
@pytest.mark.parametrize('number', range(size(2, 2000)))
def test_two_faults(trials, brief, stages, tmp_path, number):
    "A call fails, and one of those that clean up after it fails too."
    chance, all_cases = random.Random(number), cases(stages)
    stage, at, what, _ = chance.choice(all_cases)
    suffer(trials, brief, stages, (stage, at, what, chance.choice(ERRORS)), tmp_path/'case', (at + chance.randint(1, 5), chance.choice(ERRORS)))


# --- through the kernel

KERNEL = dict(fsync=('EIO', 'ENOSPC', 'EDQUOT', 'EINTR'), write=('EIO', 'ENOSPC', 'EDQUOT', 'EINTR'), rename=('EIO', 'ENOSPC'), openat=('EIO', 'EINTR'),
              close=('EIO',), mkdir=('ENOSPC',), unlink=('EIO',))


def system_calls(trials, brief, stage, place) -> list:
    "The calls of the kernel that a stage makes, in their order, as strace tells them."
    job = trials.job(prepared(stage, place), brief.sections, stop=stage[1], strace=('-e', f'trace={",".join(KERNEL)}'))
    assert trials.together([job])[0].code == 0
    return [line.partition('(')[0] for line in open(job['trace'])]


@pytest.fixture(scope='session')
def kernel_cases(trials, brief, stages, tmp_path_factory) -> list:
    "(stage, call, which of its kind, kind of fault), all that can be; skipped, loudly, where strace may not hold a process."
    if shutil.which('strace') is None: pytest.skip('NO FAULTS THROUGH THE KERNEL: strace is not installed')
    if subprocess.run(['strace', '-qq', '-o', '/dev/null', '-e', 'trace=fsync', 'true'], capture_output=True).returncode:
        pytest.skip('NO FAULTS THROUGH THE KERNEL: strace may not trace here')
    counts = [Counter(system_calls(trials, brief, stage, tmp_path_factory.mktemp('counted'))) for stage in stages]
    return [(stage, name, at, kind) for stage, count in enumerate(counts) for name, kinds in KERNEL.items()
            for at in range(1, count[name] + 1) for kind in (*kinds, 'KILL')]


def suffer_in_the_kernel(trials, brief, stages, case, place) -> None:
    "As `suffer`; the fault may also hit what is not the run's: its output, a library that is read late."
    number, name, at, kind = case
    run, how = prepared(stages[number], place), 'signal=KILL' if kind == 'KILL' else f'error={kind}'
    life = trials.live(run, brief.sections, stop=stages[number][1], strace=('-e', f'trace={name}', '-e', f'inject={name}:{how}:when={at}'))
    follows(life, brief)
    ends = {'KILL': (0, -signal.SIGKILL), 'EINTR': (0, 1, 2) if name == 'openat' else (0,)}    # a folder that is listed is not opened again
    assert life.code in ends.get(kind, (0, 1, 2)), life.err                                    # 2: a file that the user gave is not readable
    if life.code in (1, 2):
        assert os.strerror(getattr(errno, kind)) in life.err or 'cannot be opened again' in life.err, life.err
        assert '.tmp-' not in life.err, life.err
    if (run/'checkpoints').exists(): keeps(life, run)
    goes_on(trials, brief, run, f'{kind} by strace')
    shutil.rmtree(place)


@pytest.mark.goal('R2')
@pytest.mark.parametrize('part', range(size(1, 20)))
def test_faults_through_the_kernel(trials, brief, stages, kernel_cases, tmp_path, part):
    "The same with strace, at every call of the system: also where the interpreter goes on after EINTR, and where a library writes."
    mine = kernel_cases[part::20] if TORTURE else random.Random(0).sample(kernel_cases, 8)
    told = problems(lambda case, place: suffer_in_the_kernel(trials, brief, stages, case, place), mine, tmp_path)
    assert not told, told


@pytest.mark.goal('R2')
@pytest.mark.parametrize('number', range(size(2, 30)))
def test_files_that_grow_too_large(trials, brief, stages, tmp_path, number):
    "RLIMIT_FSIZE: the kernel takes a part of a file and refuses the rest."
    run, largest = prepared(stages[1], tmp_path), random.Random(number).choice((300, 1000, 3000, 10000, 20000, 30000))
    life = trials.live(run, brief.sections, largest=largest)
    if life.code: assert_told(life, run, ['EFBIG'], largest)
    keeps(life, run)
    goes_on(trials, brief, run, 'EFBIG')


# --- a disk of a size

@pytest.fixture(scope='session')
def disk(tmp_path_factory):
    "Makes a file system of so many bytes in memory, or skips loudly."
    mounted = []

    def made(size):
        place = tmp_path_factory.mktemp('disk')
        done = subprocess.run(['mount', '-t', 'tmpfs', '-o', f'size={size}', 'tmpfs', place], capture_output=True, text=True)
        if done.returncode: pytest.skip(f'NO FULL DISKS: a tmpfs cannot be mounted here: {done.stderr.strip()}')
        mounted.append(place)
        return place
    yield made
    for place in mounted: subprocess.run(['umount', place], check=True)


def resized(place, size) -> None: subprocess.run(['mount', '-o', f'remount,size={size}', place], check=True)


STEP = 64 * 1024


@pytest.mark.goal('R10')
@pytest.mark.parametrize('part', range(size(1, 10)))
def test_disks_of_all_sizes(trials, straight, disk, part):
    "From one page to twice what a run needs: the newest checkpoint is never lost, and with more room the run is as if nothing had happened."
    needed = sum(path.stat().st_blocks * 512 for path in straight.run.rglob('*'))
    sizes = [4096, *range(STEP, 2 * needed + STEP, STEP)]
    mine = sizes[part::10] if TORTURE else sizes[::max(1, len(sizes)//5)]
    outcomes = {}
    for n in mine:
        place = disk(n)
        life = trials.live(place/'run', straight.sections, blind=True)
        follows(life, straight)
        if life.code: assert_told(life, place/'run', ['ENOSPC'], n)
        if (place/'run'/'checkpoints').exists(): keeps(life, place/'run')
        outcomes[n] = life.code
        resized(place, 64 << 20)
        goes_on(trials, straight, place/'run', 'full disk')
        shutil.rmtree(place/'run')
    assert set(outcomes.values()) <= {0, 1}
    assert outcomes.get(sizes[0], 1) == 1 and outcomes.get(sizes[-1], 0) == 0, f'the smallest is too small, the largest is not: {outcomes}'
    assert TORTURE or len(set(outcomes.values())) == 2, f'sizes {mine} must have been too small and large enough'


@pytest.mark.goal('R10')
def test_a_disk_without_room_for_two_checkpoints(trials, straight, disk):
    "The run does not begin, with a line that says how much is missing; with more room it does."
    place = disk(STEP)
    life = trials.live(place/'run', straight.sections)
    assert life.code == 1 and len(life.err.splitlines()) == 1 and f'{place}/run/checkpoints has' in life.err and not life.draws, life.err
    resized(place, 64 << 20)
    goes_on(trials, straight, place/'run', 'full disk')
