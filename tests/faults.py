"""A warm process that forks the real `mmgrpo_train` on a tiny model, one child a trial, and kills it, denies it the disk, or lets it end."""
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

TORTURE = os.environ.get('MMGRPO_TORTURE', '') not in ('', '0')    # the nightly size
UPDATES = 6 if TORTURE else 4
HANG_S = 300
CLOCKS = {'train_log.jsonl', 'summary.json'}
CHANGES = {'open', 'os.rename', 'os.link', 'os.mkdir', 'os.remove', 'os.rmdir', 'os.truncate'}


def config(folder, run, sections=()) -> dict:
    "A run of one puzzle with four rollouts an update; it saves every update and evaluates every other."
    raw = dict(
        run=dict(name='run', output=str(run.parent), seed=2), data=dict(n_train=6, n_valid=2, cache_root=str(folder/'cache')),
        model=dict(path=str(folder/'model'), lora_rank=2, lora_alpha=4),
        rollout=dict(group_size=4, max_think_tokens=2, max_answer_tokens=2),
        trainer=dict(max_updates=UPDATES, prompts_per_update=1, device='cpu', micro_batch_rollouts=4),
        visual=dict(kl_coef=.1), optimizer=dict(lr=.01),
        evaluation=dict(rollouts_per_prompt=1, max_prompts=1, every_updates=2, ablations=False),
        checkpoint=dict(every_updates=1), logging=dict(pictures_every_updates=2))
    raw['run']['name'] = run.name
    for section, values in dict(sections).items(): raw[section] |= values
    return raw


# --- the server: runs in a process of its own, never in pytest

def serve(folder) -> None:
    "Load everything once; then a line of JSON for each trial, and one back."
    import gc

    import mmgrpo.cli  # noqa: F401
    import mmgrpo.trainer as trainer
    from mmgrpo.config import make_config

    answers = os.fdopen(os.dup(1), 'w', buffering=1)
    os.dup2(2, 1)
    trainer.save_example_model(folder/'model')
    cfg = make_config(config(folder, folder/'warm'))
    policy = trainer.load_policy(cfg, 'cpu')
    trainer.prepare_cache(cfg, folder/'cache', policy)
    gc.collect()
    gc.freeze()                                        # the children share these pages
    print('ready', file=answers)
    for line in sys.stdin: print(json.dumps(trial(json.loads(line), policy)), file=answers)


def trial(job:dict, policy) -> dict:
    "Fork, wait, perhaps send a signal; the child is not reaped before, so nobody else is ever hit."
    child, began, sent = os.fork(), time.monotonic(), False
    if child == 0: live(job, policy)
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        seconds = time.monotonic() - began
        if not sent and job['after'] is not None and seconds >= job['after']:
            os.kill(child, job['signal'])
            sent = True
        if seconds > HANG_S: os.kill(child, signal.SIGKILL)
        time.sleep(.001)
    seconds = time.monotonic() - began
    return dict(code=os.waitstatus_to_exitcode(ended[1]), sent=sent, seconds=seconds, hung=seconds > HANG_S)


def live(job:dict, policy) -> None:
    "The child: the command, with its lines and its draws written where a kill cannot take them back."
    import mmgrpo.cli as cli
    import mmgrpo.trainer as trainer

    code = 1
    try:
        for fd, name in ((1, 'out'), (2, 'err')): os.dup2(os.open(job[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666), fd)
        signal.signal(signal.SIGINT, signal.default_int_handler)       # whatever the shell had set
        if job['umask'] is not None: os.umask(job['umask'])
        if not job['cold']: trainer.load_policy = lambda cfg, device: policy
        note_draws(trainer, os.open(job['draws'], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666))
        changes = Changes(job['run'], job['change'], job['error'], job['lasting'])
        sys.addaudithook(changes)
        code = cli.train_main(job['words'])
        changes.at = None
        Path(job['count']).write_text(str(changes.n))
    except KeyboardInterrupt: code = 130
    except SystemExit as error: code = error.code
    except BaseException: traceback.print_exc()
    finally: os._exit(code)


def note_draws(trainer, fd) -> None:
    "Let each batch of puzzles leave a line."
    whole = trainer.query_indices_for_update

    def noting(rows, size, seed, attempted, shuffle):
        drawn = whole(rows, size, seed, attempted, shuffle)
        os.write(fd, f'{json.dumps([attempted, list(drawn)])}\n'.encode())
        return drawn
    trainer.query_indices_for_update = noting


class Changes:
    "Counts what changes the run's files (opened for writing, renamed, made, removed), and before number `at` dies or fails."
    def __init__(self, run, at=None, error=None, lasting=False):
        self.run, self.at, self.error, self.lasting, self.n = run, at, error, lasting, 0

    def __call__(self, event, args):
        if event not in CHANGES or not self.concerns(event, args): return
        self.n += 1
        if self.at is None or self.n < self.at or (self.n > self.at and not self.lasting): return
        if self.error is None: os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(self.error, os.strerror(self.error), str(args[0]))

    def concerns(self, event, args):
        if event == 'os.truncate': return True
        if event == 'open' and not (isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)): return False
        path = args[0] if isinstance(args[0], (str, os.PathLike)) else ''
        return str(path).startswith(self.run) and '/tensorboard/' not in str(path)    # these are written by a thread


# --- the client

@dataclass(frozen=True)
class Life:
    "What one process did."
    code:int
    sent:bool       # whether the signal found it alive
    seconds:float
    lines:list
    err:str
    draws:list      # [attempted, rows] of each batch, in order
    changes:int|None    # changes of files, if it lived to tell

    @property
    def start(self): return next((int(line.split('query_update=')[1].split()[0]) for line in self.lines if line.startswith('RL_RESUME')), None)


class Trials:
    "Starts trials and keeps the ledger."
    def __init__(self, folder):
        self.folder, self.n, self.injected, self.wrong = Path(folder), 0, Counter(), []
        environment = os.environ | {'OMP_NUM_THREADS': '1', 'MKL_NUM_THREADS': '1', 'PYTHONPATH': str(Path(__file__).parent.parent)}
        self.server = subprocess.Popen([sys.executable, __file__, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                       stderr=(self.folder/'server.err').open('w'), text=True, env=environment)
        assert self.server.stdout.readline() == 'ready\n', (self.folder/'server.err').read_text()

    def close(self):
        self.server.stdin.close()
        self.server.wait(timeout=60)

    def live(self, run, sections=(), *, after=None, signal=signal.SIGKILL, change=None, error=None, lasting=False, umask=None, cold=False,
             stop=None) -> Life:
        "One process of the run in `run`: killed `after` seconds, or at its `change`-th change of a file, or not at all."
        self.n += 1
        base = self.folder/f'life-{self.n}'
        base.with_suffix('.yaml').write_text(json.dumps(config(self.folder, run, sections)))
        words = ['--config', str(base.with_suffix('.yaml'))] + (['--stop-after-updates', str(stop)] if stop else [])
        names = {key: str(base.with_suffix(f'.{key}')) for key in ('out', 'err', 'draws', 'count')}
        job = dict(words=words, run=str(run), after=after, signal=int(signal), change=change, error=error, lasting=lasting,
                   umask=umask, cold=cold, **names)
        print(json.dumps(job), file=self.server.stdin, flush=True)
        told = json.loads(self.server.stdout.readline())
        assert not told['hung'], f'{words} hung'
        text = {key: Path(name).read_text() if Path(name).exists() else '' for key, name in names.items()}
        draws = [json.loads(line) for line in text['draws'].splitlines()]
        return Life(told['code'], told['sent'], told['seconds'], text['out'].splitlines(), text['err'], draws,
                    int(text['count']) if text['count'] else None)

    def ended(self, run, sections=(), **how) -> Life:
        "A process that must end well."
        life = self.live(run, sections, **how)
        assert life.code == 0, life.err
        return life

    def judge(self, kind, run, found, wanted, faults=1) -> None:
        "Count faults; what was made of them must be what is wanted."
        self.injected[kind] += faults
        if found == wanted: return
        self.wrong.append(f'{kind}: {run}')
        names = found.keys() ^ wanted.keys() | {key for key in found.keys() & wanted.keys() if found[key] != wanted[key]}
        raise AssertionError(f'{kind} of {run}: {sorted(names)} differ')

    def line(self) -> str:
        kinds = ', '.join(f'{n} {kind}' for kind, n in sorted(self.injected.items()))
        return f'faults injected: {sum(self.injected.values())} ({kinds}) in {self.n} processes; wrong resumes: {len(self.wrong)}'


# --- what must be the same

def without_clocks(name, data):
    "A file's content but for what is about wall-clock time."
    if name == 'train_log.jsonl': return [{k: v for k, v in json.loads(line).items() if not k.startswith('timing/')} for line in data.splitlines()]
    if name == 'summary.json': return {k: v for k, v in json.loads(data).items() if k != 'timing'}
    return data


def checkpoints(run) -> list:
    return sorted(p for p in (run/'checkpoints').iterdir() if p.name.startswith('update-'))


def outcome(run) -> dict:
    "The adapter, the last checkpoint with its moments, the log, reports, pictures: all but clocks and places."
    last = checkpoints(run)[-1].name
    found = {}
    for path in (Path(folder)/name for folder, _, names in os.walk(run, followlinks=True) for name in names):
        name = path.relative_to(run).as_posix()
        if name.startswith('tensorboard/') or name == 'config.json': continue
        if name.startswith('checkpoints/') and not name.startswith(f'checkpoints/{last}/'): continue
        found[name] = without_clocks(name, path.read_bytes())
    return found


def result(run) -> dict:
    "What has to be the same when a run was saved, measured or drawn at other times."
    kept = ('policy.safetensors', 'optimizer.safetensors', 'state.json', 'train_log.jsonl')
    return {name.rpartition('checkpoints/')[2]: data for name, data in outcome(run).items() if name.startswith('adapter/') or name.endswith(kept)}


def curves(run) -> dict:
    "tag -> [(step, value), ...] of every scalar but the clocks."
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    events = EventAccumulator(str(run/'tensorboard'), size_guidance=dict(scalars=0)).Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()['scalars'] if not tag.startswith('timing/')}


if __name__ == '__main__': serve(Path(sys.argv[1]))
