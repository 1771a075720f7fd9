"""Two real processes: what one of them says, fails at or is asked, the other knows; and none waits for one that is gone.

Run as a script, this file is the two processes: it imports once and forks."""
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest


# --- the processes

class Odd(Exception):
    "Cannot be made again from its text."
    def __init__(self, a, b): super().__init__(f'{a}{b}')


def fail(error): raise error


def attempted(work):
    "What came of it, as text."
    try: return repr(work())
    except Exception as error: return f'{type(error).__name__}: {error}'


def conversation(context, rank) -> dict:
    "Everything two ranks can say to each other, in one order on both."
    import torch
    from mmgrpo.settings import InputError

    sums = [torch.tensor([1., rank]), torch.tensor([rank + 1.])]
    context.sum_(sums)
    found = dict(gathered=context.all_gather_object(rank), sent=context.broadcast_object(('main', rank)), sums=[t.tolist() for t in sums])
    stages = dict(one=lambda: fail(ValueError('no')) if rank else 5, both=lambda: fail(OSError(f'disk {rank}')), none=lambda: rank)
    calls = dict(value=lambda: {'a': 1}, nothing=lambda: None, bad_input=lambda: fail(InputError('run.name: no')), bug=lambda: fail(KeyError('x')),
                 odd=lambda: fail(Odd('a', 'b')), unsendable=lambda: lambda: 5)
    found['stages'] = {name: attempted(lambda: context.gather_stage(name, work)) for name, work in stages.items()}
    found['calls'] = {name: attempted(lambda: context.main_call(name, work)) for name, work in calls.items()}
    found['asked'] = [context.agree_on_stop(asked) for asked in (None, 15 if rank else None, 2 if rank else 15)]
    context.slow_s, context.stage = .1, 'a nap'
    if rank: time.sleep(.5)
    context.barrier()
    return found


def process(rank, port, how) -> None:
    "One of the two."
    from mmgrpo.process import DistributedContext
    from accelerate import Accelerator

    os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE='2', LOCAL_WORLD_SIZE='2', MASTER_ADDR='127.0.0.1', MASTER_PORT=port)
    context = DistributedContext(Accelerator(cpu=True))
    found = conversation(context, rank) if how == 'talk' else {}
    if how == 'die':
        if rank: os.kill(os.getpid(), signal.SIGKILL)
        found['alone'] = attempted(lambda: context.all_gather_object(0))
        os.write(1, f'{json.dumps(found)}\n'.encode())
        os._exit(3)
    context.close()
    context.close()
    os.write(1, f'{json.dumps(found)}\n'.encode())


def serve(port, how) -> None:
    import mmgrpo.process  # noqa: F401

    for rank in (0, 1):
        if os.fork(): continue
        process(rank, port, how)
        os._exit(0)
    for _ in range(2): os.wait()


# --- the tests

def together(how) -> tuple[list, str]:
    "What the two wrote."
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(Path(__file__).parent.parent)}
    done = subprocess.run([sys.executable, __file__, port, how], capture_output=True, text=True, timeout=120, env=environment)
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


@pytest.fixture(scope='module')
def talk():
    found, err = together('talk')
    assert len(found) == 2, err
    return found, err


def test_what_is_said_is_heard_by_both(talk):
    one, two = talk[0]
    assert one['gathered'] == [0, 1] and one['sent'] == ['main', 0] and one['sums'] == [[2, 1], [3]]
    assert {key: one[key] for key in ('gathered', 'sent', 'sums', 'asked')} == {key: two[key] for key in ('gathered', 'sent', 'sums', 'asked')}
    assert one['asked'] == [None, 15, 15]


@pytest.mark.goal('R8')
def test_a_failure_on_one_rank_is_a_failure_on_both(ledger, talk):
    "Whatever a rank does when it fails, both raise, with the rank and the reason."
    for found in talk[0]:
        assert found['stages']['one'] == "RuntimeError: one failed on rank 1 (rank 1: ValueError('no'))"
        assert found['stages']['both'] == "RuntimeError: both failed on rank 0, 1 (rank 0: OSError('disk 0'); rank 1: OSError('disk 1'))"
    assert sorted(found['stages']['none'] for found in talk[0]) == ['0', '1']
    ledger.fault('failure of a rank', 3)


def test_the_main_rank_is_believed(talk):
    odd = []
    for found in talk[0]:
        calls = found['calls']
        odd.append(calls.pop('odd'))
        assert calls.pop('unsendable').startswith('TypeError: a function cannot be sent to other ranks')
        assert calls == dict(value="{'a': 1}", nothing='None', bad_input='InputError: run.name: no', bug="KeyError: 'x'")
    assert sorted(odd) == ['Odd: ab', 'RuntimeError: Odd: ab']


def test_a_rank_that_waits_says_where(talk):
    said = re.findall(r'rank (\d) has waited 0.1 s for the others, at (.*)', talk[1])
    assert ('0', "'a nap'") in said, talk[1]


@pytest.mark.goal('R8')
def test_none_waits_for_a_rank_that_is_gone(ledger):
    "Killed in the middle of a collective."
    began = time.monotonic()
    found, err = together('die')
    assert len(found) == 1 and 'Error' in found[0]['alone'], err
    assert time.monotonic() - began < 60
    ledger.fault('SIGKILL of a rank')


if __name__ == '__main__': serve(*sys.argv[1:])
