"""What a power cut may leave: a disk that is recorded call by call, and every state that its calls, cut off anywhere, can be found in.

As a file system may do it (weaker than any one does): data that was not synced is there, is not, is zeros or is there in part; an entry of a directory
that was not synced (a name made, renamed, removed) is there or is not, each by itself; a rename is one step. What was synced is there."""
import itertools
import os
from dataclasses import dataclass, field
from pathlib import Path

from mmgrpo.storage import Disk

CALLS = tuple(Disk.__dataclass_fields__)


class Died(BaseException):
    "The process is gone: nothing after this call happens, clean-up included."


class Recorder:
    "A real disk below `root` that writes down what is done to it, and kills the process before call `at`."
    def __init__(self, root, at=None):
        self.root, self.at, self.n, self.ops, self.start = Path(root), at, 0, [], 0
        self.tree, self.fds, self.fresh = {'': 0}, {}, itertools.count(1)    # path -> inode; descriptor -> inode

    def disk(self): return Disk(**{name: self.wrap(name) for name in CALLS})

    def wrap(self, name):
        real = os.fstat if name == 'fsync' else getattr(Disk, name)         # nobody cuts the power of this machine

        def call(*args):
            self.n += 1
            if self.at is not None and self.n >= self.at: raise Died
            new = name == 'open' and not os.path.lexists(args[0])
            result = real(*args)
            getattr(self, f'_{name}', lambda *args: None)(result, new, *args)     # what only looks leaves no trace
            return result
        return call

    def said(self, **facts): self.ops.append(('said', facts))
    def place(self, path): return Path(path).relative_to(self.root).as_posix().removeprefix('.')
    def entry(self, path): return self.tree[self.place(Path(path).parent)], Path(path).name

    def _open(self, fd, new, path, flags, mode):
        if new: self._made('file', path)
        elif flags & os.O_TRUNC: self.ops.append(('truncate', self.tree[self.place(path)], 0))
        self.fds[fd] = self.tree[self.place(path)]

    def _made(self, kind, path):
        self.tree[self.place(path)] = inode = next(self.fresh)
        self.ops.append((kind, *self.entry(path), inode))

    def _write(self, taken, new, fd, data):
        at = os.lseek(fd, 0, os.SEEK_CUR) - taken
        self.ops.append(('write', self.fds[fd], at, bytes(data[:taken])))

    def _truncate(self, result, new, fd, size): self.ops.append(('truncate', self.fds[fd], size))
    def _fsync(self, result, new, fd): self.ops.append(('fsync', self.fds[fd]))
    def _close(self, result, new, fd): del self.fds[fd]
    def _mkdir(self, result, new, path, *mode): self._made('folder', path)

    def _replace(self, result, new, old, path):
        self.ops.append(('rename', *self.entry(old), *self.entry(path)))
        old, path = self.place(old), self.place(path)
        moved = {p: i for p, i in self.tree.items() if p == old or p.startswith(f'{old}/')}
        self.tree = {p: i for p, i in self.tree.items() if p not in moved}
        self.tree |= {path + p[len(old):]: i for p, i in moved.items()}

    def _link(self, result, new, old, path):
        self.tree[self.place(path)] = inode = self.tree[self.place(old)]
        self.ops.append(('file', *self.entry(path), inode))

    def _unlink(self, result, new, path):
        self.ops.append(('remove', *self.entry(path)))
        del self.tree[self.place(path)]
    _rmdir = _unlink


@dataclass
class Inode:
    "A file or a directory: what the disk has of it for sure, and what is still on its way, in order."
    durable:object                                    # bytes of a file, {name: inode} of a directory
    pending:list = field(default_factory=list)

    @property
    def is_file(self): return isinstance(self.durable, bytes)


def changed(data:bytes, op) -> bytes:
    "A file after a write or a truncation."
    kind, at, new = op
    if kind == 'truncate': return data[:at].ljust(at, b'\0')
    return data[:at].ljust(at, b'\0') + new + data[at + len(new):]


def entries(durable:dict, ops) -> dict:
    "A directory after some of its changes; what is None is gone."
    found = dict(durable)
    for op in ops: found |= op
    return {name: inode for name, inode in found.items() if inode is not None}


class World:
    "The disk after some calls."
    def __init__(self): self.inodes, self.said = {0: Inode({})}, {}

    def apply(self, op) -> None:
        kind, *args = op
        if kind == 'said': self.said = self.said | args[0]
        elif kind in ('file', 'folder'):
            folder, name, inode = args
            self.inodes.setdefault(inode, Inode(b'' if kind == 'file' else {}))
            self.inodes[folder].pending.append({name: inode})
        elif kind == 'rename':
            folder, old, other, new = args
            assert folder == other, 'a rename across directories is not one step on every file system'
            self.inodes[folder].pending.append({old: None, new: self.now(folder)[old]})
        elif kind == 'remove': self.inodes[args[0]].pending.append({args[1]: None})
        elif kind in ('write', 'truncate'): self.inodes[args[0]].pending.append((kind, args[1], args[2] if kind == 'write' else b''))
        else: self.sync(self.inodes[args[0]])

    def now(self, folder) -> dict: return entries(self.inodes[folder].durable, self.inodes[folder].pending)

    def sync(self, inode) -> None:
        inode.durable, inode.pending = self.whole(inode), []

    def whole(self, inode):
        "What a process sees."
        if not inode.is_file: return entries(inode.durable, inode.pending)
        data = inode.durable
        for op in inode.pending: data = changed(data, op)
        return data

    def versions(self, inode, chance) -> list:
        "What a power cut may leave of it; first what a process sees, last what was synced."
        if not inode.pending: return [inode.durable]
        if not inode.is_file:
            n = len(inode.pending)
            kept = list(itertools.product((True, False), repeat=n)) if n <= 4 else [
                *([i < k for i in range(n)] for k in range(n, -1, -1)), *([i == k for i in range(n)] for k in range(n)),
                *([i != k for i in range(n)] for k in range(n)), *([chance.random() < .5 for _ in range(n)] for _ in range(8))]
            found = [entries(inode.durable, itertools.compress(inode.pending, each)) for each in kept]
        else:
            whole, old = self.whole(inode), inode.durable
            first = min(at for _, at, _ in inode.pending)
            grown, half = len(whole) - first, first + max(0, len(whole) - first)//2
            found = [whole, whole[:first] + bytes(max(0, grown)), whole[:half], whole[:half] + bytes(len(whole) - half), whole[:first],
                     *(changed(old, op) for op in inode.pending), whole[:first] + bytes(half - first) + whole[half:], old]
        return [each for i, each in enumerate(found) if each not in found[:i]]

    def states(self, chance, most):
        "Trees (path -> bytes, None for a directory) that a power cut may leave now: all of them, or `most` with the extremes among them."
        living = self.reachable()
        versions = {i: self.versions(self.inodes[i], chance) for i in living if self.inodes[i].pending}
        count = 1
        for each in versions.values(): count *= len(each)
        if count <= most: chosen = itertools.product(*versions.values())
        else:
            extremes = [[each[0] for each in versions.values()], [each[-1] for each in versions.values()]]
            chosen = itertools.chain(extremes, ([chance.choice(each) for each in versions.values()] for _ in range(most - 2)))
        for choice in chosen: yield self.tree(dict(zip(versions, choice)))

    def reachable(self) -> list:
        "Inodes that some name, old or new, leads to."
        found, waiting = [], [0]
        while waiting:
            at = waiting.pop()
            if at in found: continue
            found.append(at)
            inode = self.inodes[at]
            if inode.is_file: continue
            waiting += [i for names in (inode.durable, *inode.pending) for i in names.values() if i is not None]
        return found

    def tree(self, versions, at=0, prefix='') -> dict:
        "Path -> content, with these versions of what was not synced."
        found = {}
        for name, i in versions.get(at, self.inodes[at].durable).items():
            path, inode = f'{prefix}{name}', self.inodes[i]
            found[path] = versions.get(i, inode.durable) if inode.is_file else None
            if not inode.is_file: found |= self.tree(versions, i, f'{path}/')
        return found


def crash_states(ops, chance, most, start=0):
    "(what was said by then, tree) of each state that a power cut before, between or after the calls from `start` on may leave; each once."
    world, seen = World(), set()
    for number, op in enumerate([None, *ops]):
        if op: world.apply(op)
        for tree in world.states(chance, most) if number >= start else ():
            key = hash((frozenset(tree.items()), tuple(sorted(world.said.items()))))
            if key not in seen: yield world.said, tree
            seen.add(key)


def lay_out(tree, folder) -> Path:
    "Make a tree real."
    for path, data in sorted(tree.items()):
        if data is None: (folder/path).mkdir()
        else: (folder/path).write_bytes(data)
    return folder
