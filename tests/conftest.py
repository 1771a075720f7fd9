"""One thread and a fixed order of examples: a test that passes here passes everywhere. The fault tests share one server and one ledger."""
import os
from collections import Counter

for name in ('OMP_NUM_THREADS', 'MKL_NUM_THREADS'): os.environ.setdefault(name, '1')    # before torch is imported

import pytest  # noqa: E402
from faults import BRIEF, LONG, PAUSE, UPDATES, Trials, undisturbed  # noqa: E402
from hypothesis import settings  # noqa: E402
from ledger import Ledger, of_piece  # noqa: E402

settings.register_profile('fixed', deadline=None, derandomize=True)
settings.load_profile('fixed')


# --- the ledger: `@pytest.mark.goal('R1')` says what the faults of a test are counted for

def pytest_configure(config):
    config.addinivalue_line('markers', 'goal(name): the reliability goal that a test belongs to')
    config.ledger = Ledger()


def pytest_collection_modifyitems(items):
    "A session may take a share of each fault test's cases."
    marked = {}
    for item in items:
        if item.get_closest_marker('goal'): marked.setdefault(item.function, []).append(item)
    kept = {item for cases in marked.values() for item in of_piece(cases)}
    items[:] = [item for item in items if not item.get_closest_marker('goal') or item in kept]


def pytest_runtest_setup(item):
    goal = item.get_closest_marker('goal')
    about = (item.function.__doc__ or '').partition('\n')[0] if hasattr(item, 'function') else ''
    item.config.ledger.begin(f'{item.path.name}::{getattr(item, "originalname", item.name)}', goal.args[0] if goal else '', about)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report, entry = (yield).get_result(), item.config.ledger.test
    if entry is None: return
    entry.seconds += report.duration if report.when == 'call' else 0
    entry.cases += report.when == 'call' and not report.skipped
    entry.failed += report.failed
    entry.skipped += report.skipped


def pytest_terminal_summary(terminalreporter, config):
    "The line that says how it went and how much it was, and what was measured."
    goals = Counter()
    for entry in config.ledger.entries.values(): goals[entry.goal or 'other'] += sum(entry.faults.values())
    lines = [config.ledger.line(), ', '.join(f'{goal}: {n:,}' for goal, n in sorted(goals.items()) if n)]
    for line in lines + [f'{name}: {value}' for name, value in config.ledger.figures.items()]:
        if line: terminalreporter.write_line(line)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item):
    "The record grows with every test: a session that is broken off has left what it did."
    path = os.environ.get('MMGRPO_TORTURE_RECORD')
    if path and item.get_closest_marker('goal'): item.config.ledger.write(path)


def pytest_sessionfinish(session):
    "The last test's teardown is over."
    if path := os.environ.get('MMGRPO_TORTURE_RECORD'): session.config.ledger.write(path)


@pytest.fixture(scope='session')
def ledger(request): return request.config.ledger


# --- runs that fault tests compare with and go on from

@pytest.fixture(scope='session')
def trials(ledger, tmp_path_factory):
    "The warm process that starts runs."
    made = Trials(tmp_path_factory.mktemp('faults'), ledger)
    yield made
    made.close()


@pytest.fixture(scope='session')
def straight(trials, tmp_path_factory):
    "The run of four updates that nobody disturbs: its life, its place, its outcome."
    return undisturbed(trials, tmp_path_factory.mktemp('straight')/'run', UPDATES)


@pytest.fixture(scope='session')
def long(trials, tmp_path_factory):
    "The same with twelve updates."
    return undisturbed(trials, tmp_path_factory.mktemp('long')/'run', 12, LONG)


@pytest.fixture(scope='session')
def brief(trials, tmp_path_factory):
    "The same with three updates, of which one checkpoint is kept."
    return undisturbed(trials, tmp_path_factory.mktemp('brief')/'run', 3, BRIEF)


@pytest.fixture(scope='session')
def paused(trials, straight, tmp_path_factory):
    "A run that stopped between two evaluations."
    run = tmp_path_factory.mktemp('paused')/'run'
    assert trials.ended(run, stop=PAUSE).lines[-1] == f'RL_PAUSED step={PAUSE}'
    return run

