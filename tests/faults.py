"""A warm process that forks the real `mmgrpo_train` on a tiny model, one child a trial, and kills it, denies it the disk, breaks its numbers,
or lets it end."""
import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

UPDATES, PAUSE = 4, 3       # of the run that most tests go on with: to its end, and where it was stopped
HANG_S = 300
CLOCKS = {'train_log.jsonl', 'summary.json'}
CHANGES = {'open', 'os.rename', 'os.link', 'os.mkdir', 'os.remove', 'os.rmdir', 'os.truncate'}
CALLS = ('open', 'write', 'fsync', 'truncate', 'close', 'replace', 'link', 'mkdir', 'unlink', 'rmdir')     # of `mmgrpo.storage.Disk`

LONG = dict(trainer=dict(max_updates=12), evaluation=dict(every_updates=4), logging=dict(pictures_every_updates=4))
BRIEF = dict(trainer=dict(max_updates=3), evaluation=dict(every_updates=0), checkpoint=dict(keep_latest=1))


def config(folder, run, sections=()) -> dict:
    "A run of one puzzle with four rollouts an update; it saves every update and evaluates every other."
    raw = dict(
        run=dict(name=run.name, output=str(run.parent), seed=1), data=dict(n_train=6, n_valid=1, cache_root=str(folder/'cache')),
        model=dict(path=str(folder/'model'), lora_rank=2, lora_alpha=4, lora_targets=['q_proj', 'v_proj']),
        rollout=dict(group_size=4, max_think_tokens=1, max_answer_tokens=1, image_grid=[2, 2], text_temperature=.5),
        trainer=dict(max_updates=UPDATES, prompts_per_update=1, device='cpu', micro_batch_rollouts=4),
        visual=dict(kl_coef=.1), optimizer=dict(lr=.01),
        evaluation=dict(rollouts_per_prompt=1, max_prompts=1, every_updates=2, ablations=False),
        checkpoint=dict(every_updates=1), logging=dict(pictures_every_updates=2, n_pictures=1))
    for section, values in dict(sections).items(): raw[section] = raw.get(section, {}) | values
    return raw


# --- the server: runs in a process of its own, never in pytest

def serve(folder) -> None:
    "Load everything once; then a line of JSON for each trial, and one back."
    import gc

    import mmgrpo.cli  # noqa: F401
    import mmgrpo.trainer  # noqa: F401
    from mmgrpo.config import make_config
    from mmgrpo.setup import load_policy, prepare_cache

    answers = os.fdopen(os.dup(1), 'w', buffering=1)
    os.dup2(2, 1)
    save_model(folder/'model')
    cfg = make_config(config(folder, folder/'warm'))
    policy = load_policy(cfg, 'cpu')
    prepare_cache(cfg, folder/'cache', policy)
    gc.collect()
    gc.freeze()                                        # the children share these pages
    print('ready', file=answers)
    for line in sys.stdin: print(json.dumps(trial(json.loads(line), policy)), file=answers)


def save_model(folder) -> None:
    "The example model with one layer of each kind and four tokens a picture: what a run does is the same, in a fifth of the time."
    import mmgrpo.setup as setup
    whole, decoder = setup.toy_config, setup.PixelDecoder

    def small(text, vision, **flags):
        text |= dict(hidden_size=16, num_hidden_layers=1, intermediate_size=32)
        return whole(text=text, vision=vision | dict(depth=1, patch_size=16, num_position_embeddings=16, out_hidden_size=16), **flags)

    class Decoder(decoder):
        def __init__(self, n_bits, patch, hidden, depth): super().__init__(n_bits, 16, 8, depth)

    setup.toy_config, setup.PixelDecoder = small, Decoder
    setup.save_example_model(folder)
    setup.toy_config, setup.PixelDecoder = whole, decoder


def trial(jobs:list, policy) -> list:
    "Fork a process for each job, send signals when they are due; no child is reaped before, so nobody else is ever hit."
    began, living, ended = time.monotonic(), {}, {}
    for number, job in enumerate(jobs):
        if (child := os.fork()) == 0: live(job, policy, began)
        living[child] = number
        if job['strace']: attach(child, job)
    due = sorted((at, child, sent) for child, number in living.items() for at, sent in jobs[number]['signals'])
    hit = {number: [] for number in living.values()}
    clock = lambda child: spent(child) if jobs[living[child]]['cpu'] else time.monotonic() - began
    while living:
        seconds = time.monotonic() - began
        for child in list(living):
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid: ended[living.pop(child)] = (os.waitstatus_to_exitcode(status), time.monotonic() - began)
            elif seconds > HANG_S: os.kill(child, signal.SIGKILL)
        due = [(at, child, sent) for at, child, sent in due if child in living]
        for at, child, sent in [entry for entry in due if clock(entry[1]) >= entry[0]]:
            os.kill(child, sent)
            hit[living[child]].append(time.monotonic() - began)
            due.remove((at, child, sent))
        time.sleep(.002)
    return [dict(code=ended[n][0], seconds=ended[n][1], sent=len(hit[n]), lasted=ended[n][1] - min(hit[n], default=ended[n][1]),
                 hung=ended[n][1] > HANG_S) for n in range(len(jobs))]


def spent(child) -> float:
    "Seconds of work that a process was given: on a busy machine the better measure of how far it is."
    return int(Path(f'/proc/{child}/schedstat').read_text().split()[0]) / 1e9


def attach(child, job) -> None:
    "Let strace hold a child that waits for it."
    subprocess.Popen(['strace', '-qq', '-o', job['trace'], '-p', str(child), *job['strace']], stdin=subprocess.DEVNULL)


def live(job:dict, policy, began) -> None:
    "The child: the command, with its lines and its draws written where a kill cannot take them back."
    import resource
    import threading

    import mmgrpo.cli as cli
    import tqdm
    from mmgrpo.storage import DISK

    code = 1
    try:
        for fd, name in ((1, 'out'), (2, 'err')): os.dup2(os.open(job[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666), fd)
        signal.signal(signal.SIGINT, signal.default_int_handler)       # whatever the shell had set
        tqdm.tqdm.set_lock(threading.RLock())                          # tqdm's own is shared by forked processes: one that is killed keeps it
        draws = os.open(job['draws'], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        surroundings(job)
        if not job['cold']: put('load_policy', lambda cfg, device: policy)
        note_draws(draws, Poison(policy, **job['poison']) if job['poison'] else None)
        changes, calls = Changes(job['run'], job['change'], job['error'], job['lasting']), Calls(DISK, **job['call'])
        sys.addaudithook(changes)
        while job['strace'] and 'TracerPid:\t0\n' in Path('/proc/self/status').read_text(): time.sleep(.001)
        while time.monotonic() < began + job['begin']: pass            # all processes of a trial at once
        code = cli.train_main(job['words'])
        changes.at = calls.at = None
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        Path(job['count']).write_text(json.dumps(dict(changes=changes.n, trace=calls.trace, written=calls.written, cpu=spent(os.getpid()))))
    except KeyboardInterrupt: code = 130
    except SystemExit as error: code = error.code
    except BaseException: traceback.print_exc()
    finally: os._exit(code)


def surroundings(job) -> None:
    "What a process finds: umask, environment, the clock, the largest file."
    import resource

    from mmgrpo.storage import DISK
    if job['umask'] is not None: os.umask(job['umask'])
    os.environ.update(job['environ'])
    if job['blind']: object.__setattr__(DISK, 'statvfs', lambda path: os.statvfs('/'))     # as where others fill the disk meanwhile
    if job['clock']: time.time = lambda whole=time.time, off=job['clock']: whole() + off
    if job['largest']:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (job['largest'], resource.RLIM_INFINITY))


def put(name, value):
    "Replace a function in every room that has it; the function that was there."
    rooms = [room for key, room in list(sys.modules.items()) if key.startswith('mmgrpo.') and hasattr(room, name)]
    whole = getattr(rooms[0], name)
    for room in rooms: setattr(room, name, value)
    return whole


def note_draws(fd, poison) -> None:
    "Let each batch of puzzles leave a line, and tell the poison its number."
    def noting(rows, size, seed, attempted, shuffle):
        drawn = whole(rows, size, seed, attempted, shuffle)
        os.write(fd, f'{json.dumps([attempted, list(drawn)])}\n'.encode())
        if poison: poison.attempted = attempted
        return drawn
    whole = put('query_indices_for_update', noting)


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


class Calls:
    "Stands between a run and its disk: notes every call of `mmgrpo.storage.DISK`; number `at` (and `then`) dies, fails or does half."
    def __init__(self, disk, at=None, kind=None, then=None):
        self.at, self.kind, self.then, self.trace, self.names, self.written = at, kind, then, [], {}, 0
        for name in CALLS: object.__setattr__(disk, name, lambda *args, name=name, real=getattr(disk, name): self.call(name, real, *args))

    def call(self, name, real, *args):
        self.trace.append(f'{name} {self.names.get(args[0], args[0])}')
        n, kind = len(self.trace), self.kind
        if self.then and n == self.then[0]: kind = self.then[1]
        elif n != self.at: return self.done(name, args, real(*args))
        if kind == 'kill before': os.kill(os.getpid(), signal.SIGKILL)
        if kind == 'short': return self.done(name, args, real(args[0], args[1][:max(1, len(args[1])//2)]))
        if kind == 'kill after':
            with contextlib.suppress(OSError): real(*args)             # a file that is not there any more is unlinked in vain
        elif name == 'close': real(*args)                              # a descriptor is gone, whatever close says
        elif name == 'write': real(args[0], args[1][:len(args[1])//2])
        if kind == 'kill after': os.kill(os.getpid(), signal.SIGKILL)
        code = getattr(errno, kind)
        raise OSError(code, os.strerror(code))

    def done(self, name, args, found):
        if name == 'open': self.names[found] = str(args[0])
        if name == 'write': self.written += found
        return found


class Poison:
    "Makes numbers of the updates `first` .. `first + n - 1` NaN or infinite, at one place of the computation."
    def __init__(self, policy, place, value, first, n):
        import torch

        import mmgrpo.engine as engine
        import mmgrpo.verifier as verifier
        self.attempted, self.value, self.updates, self.policy = None, float(value), range(first, first + n), policy
        kind, _, what = place.partition(' ')
        if kind == 'gradient': torch.nn.utils.clip_grad_norm_ = self.gradients(torch.nn.utils.clip_grad_norm_, what)
        for name in ('grpo_loss', 'objective_loss') if kind == 'loss' else ():
            if hasattr(engine, name): setattr(engine, name, self.losses(getattr(engine, name), what))
        if kind == 'logits': self.heads(engine, what)
        if kind == 'reward': verifier.VisualJigsawABCDVerifier.__call__ = self.rewards(verifier.VisualJigsawABCDVerifier.__call__)

    @property
    def now(self): return self.attempted in self.updates

    def gradients(self, whole, group):
        def clip(parameters, *args, **kwargs):
            if self.now: self.policy.parameter_groups()[group][0].grad.view(-1)[-1] = self.value
            return whole(parameters, *args, **kwargs)
        return clip

    def losses(self, whole, kind):
        def loss(terms, *args, **kwargs):
            found, stats = whole(terms, *args, **kwargs)
            mine = kind == ('visual' if terms.n_parts > 1 else 'text')
            return (found * self.value if self.now and mine else found), stats
        return loss

    def heads(self, engine, kind):
        import torch
        whole, backward, inside, rows = getattr(self.policy, f'{kind}_head'), engine.backward, [], torch.zeros(1, dtype=torch.long)

        def head(hidden):
            logits = whole(hidden)
            return logits.index_fill(0, rows.to(logits.device)[:len(logits)], self.value) if inside and self.now else logits

        def scoring(*args, **kwargs):
            inside.append(True)
            try: return backward(*args, **kwargs)
            finally: inside.pop()
        object.__setattr__(self.policy, f'{kind}_head', head)
        engine.backward = scoring

    def rewards(self, whole):
        import dataclasses

        def verdict(verifier, rollout, gold):
            found = whole(verifier, rollout, gold)
            return dataclasses.replace(found, reward=self.value) if self.now and rollout.index == 0 else found
        return verdict


# --- the client

@dataclass(frozen=True)
class Life:
    "What one process did."
    code:int
    sent:int            # signals that found it alive
    seconds:float
    lasted:float        # of these, seconds after the first signal
    lines:list
    err:str
    draws:list          # [attempted, rows] of each batch, in order
    changes:int|None    # changes of files, if it lived to tell
    trace:list          # its calls of the disk, the same
    written:int|None    # bytes it wrote, the same
    cpu:float|None      # seconds of work, the same

    @property
    def start(self): return next((int(line.split('query_update=')[1].split()[0]) for line in self.lines if line.startswith('RL_RESUME')), None)

    @property
    def saved(self): return max((int(line.split('step=')[1].split()[0]) for line in self.lines if line.startswith('RL_CHECKPOINT')), default=None)


class Trials:
    "Starts trials; the ledger counts what was done to them."
    def __init__(self, folder, ledger, script=__file__):
        self.folder, self.ledger, self.n = Path(folder), ledger, 0
        environment = os.environ | {'OMP_NUM_THREADS': '1', 'MKL_NUM_THREADS': '1', 'PYTHONPATH': str(Path(__file__).parent.parent)}
        self.server = subprocess.Popen([sys.executable, str(script), str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                       stderr=(self.folder/'server.err').open('w'), text=True, env=environment)
        assert self.server.stdout.readline() == 'ready\n', (self.folder/'server.err').read_text()

    def close(self):
        self.server.stdin.close()
        self.server.wait(timeout=60)

    def job(self, run, sections=(), *, after=None, signal=signal.SIGKILL, signals=(), stop=None, call=(), **how) -> dict:
        "One process: killed `after` seconds, or at its `change`-th change of a file, or at a call of the disk, or not at all."
        self.n += 1
        base = self.folder/f'life-{self.n}'
        base.with_suffix('.yaml').write_text(json.dumps(config(self.folder, run, sections)))
        words = ['--config', str(base.with_suffix('.yaml'))] + (['--stop-after-updates', str(stop)] if stop else [])
        names = {key: str(base.with_suffix(f'.{key}')) for key in ('out', 'err', 'draws', 'count', 'trace')}
        plain = dict(change=None, error=None, lasting=False, umask=None, cold=False, environ={}, clock=0, largest=None, blind=False, poison=None,
                     begin=0, strace=(), cpu=False)
        assert how.keys() <= plain.keys(), how
        sent = [(after, int(signal))] if after is not None else [(at, int(number)) for at, number in signals]
        return dict(words=words, run=str(run), signals=sent, call=dict(call)) | plain | how | names

    def together(self, jobs) -> list:
        "Several processes at the same time, one life each."
        print(json.dumps(jobs), file=self.server.stdin, flush=True)
        told = json.loads(self.server.stdout.readline())
        self.ledger.processes += len(jobs)
        return [self.life(job, one) for job, one in zip(jobs, told)]

    def life(self, job, told) -> Life:
        assert not told['hung'], f'{job["words"]} hung'
        text = {key: Path(job[key]).read_text() if Path(job[key]).exists() else '' for key in ('out', 'err', 'draws', 'count')}
        draws, count = [json.loads(line) for line in text['draws'].splitlines()], json.loads(text['count'] or '{}')
        return Life(told['code'], told['sent'], told['seconds'], told['lasted'], text['out'].splitlines(), text['err'], draws,
                    *(count.get(key) for key in ('changes', 'trace', 'written', 'cpu')))

    def live(self, run, sections=(), **how) -> Life: return self.together([self.job(run, sections, **how)])[0]

    def ended(self, run, sections=(), **how) -> Life:
        "A process that must end well."
        life = self.live(run, sections, **how)
        assert life.code == 0, life.err
        return life

    def cold(self, run, sections=(), after=None, started=True, number=signal.SIGKILL) -> int:
        "A new interpreter, as from a shell, perhaps sent a signal some seconds after it began to train (or was started); its exit code."
        job = self.job(run, sections)
        words = [sys.executable, '-c', 'import sys; from mmgrpo.cli import train_main; sys.exit(train_main())', *job['words']]
        environment = os.environ | {'OMP_NUM_THREADS': '1', 'MKL_NUM_THREADS': '1', 'PYTHONPATH': str(Path(__file__).parent.parent)}
        self.ledger.processes += 1
        with open(job['out'], 'w') as out, open(job['err'], 'w') as err, subprocess.Popen(words, stdout=out, stderr=err, env=environment) as process:
            while after is not None and started and process.poll() is None and 'RL_RESUME' not in Path(job['out']).read_text(): time.sleep(.02)
            try: return process.wait(timeout=HANG_S if after is None else after)
            except subprocess.TimeoutExpired:
                process.send_signal(number if after is not None else signal.SIGKILL)
                assert after is not None, f'{words} hung'
                return ends_soon(process)

    def judge(self, *args, **kwargs): self.ledger.judge(*args, **kwargs)


class Straight(NamedTuple):
    "A run that nobody disturbed."
    life:Life
    run:Path
    found:dict      # its outcome
    sections:dict   # of its config
    curves:dict


def ends_soon(process, patience_s=45.) -> int:
    "The exit code of a process that was asked to end: soon, or it is killed and the test fails."
    try: return process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f'it went on for more than {patience_s} s') from None


def undisturbed(trials, run, updates, sections=()) -> Straight:
    "A run from its start to its end; it must have learnt something in every update."
    life = trials.ended(run, sections)
    found = outcome(run)
    assert all(record['grad_norm'] > 0 for record in found['train_log.jsonl']), 'otherwise these tests would prove little'
    assert [number for number, _ in life.draws] == list(range(updates))
    return Straight(life, run, found, dict(sections), curves(run))


def copied(run, place) -> Path: return Path(shutil.copytree(run, place/'run', symlinks=True))


def files(run) -> dict: return {p: p.read_bytes() for p in run.rglob('*') if p.is_file()}


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


def follows(life, straight) -> None:
    "The batches of a life are those of the undisturbed run, from where it started and in their order."
    wanted = straight[0].draws[life.start or 0:][:len(life.draws)]
    assert life.draws == wanted, (life.start, life.draws, wanted)


def keeps(life, run) -> None:
    "Every checkpoint that a process had announced is there, or a newer one, and it is sound."
    from mmgrpo.checkpoint import latest_checkpoint, load_checkpoint
    newest = latest_checkpoint(run)
    if life.saved is not None: assert load_checkpoint(newest).state['successful'] >= life.saved, (newest, life.saved)


def goes_on(trials, straight, run, kind, faults=1) -> None:
    "Start the run again until it is finished: everything is as if nothing had happened."
    if not (run/'summary.json').exists(): follows(trials.ended(run, straight.sections), straight)
    trials.judge(kind, run, outcome(run), straight.found, faults)
    assert curves(run) == straight.curves, 'each point once'


if __name__ == '__main__': serve(Path(sys.argv[1]))
