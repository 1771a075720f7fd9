"""One tiny run for the tests that only look at what a run leaves: paused, finished, and another one beside it. Made once a session, never changed."""
import contextlib
import io
import shutil
from dataclasses import dataclass
from pathlib import Path

import mmgrpo.trainer as trainer
from faults import config
from mmgrpo.config import RLConfig, make_config
from mmgrpo.policy import UniARPolicy

PAUSE, MADE = 3, {}


@dataclass(frozen=True)
class Tiny:
    "Where it lies, and its policy with fresh weights."
    folder:Path
    policy:UniARPolicy

    def config(self, run, sections=()) -> RLConfig: return make_config(config(self.folder, Path(run), sections))
    def copy(self, name, place) -> Path: return Path(shutil.copytree(self.folder/name/'run', Path(place)/'run', symlinks=True))


def train(cfg, **kwargs) -> list[str]:
    "Train; the lines it wrote."
    with contextlib.redirect_stdout(io.StringIO()) as out: trainer.train(cfg, **kwargs)
    return out.getvalue().splitlines()


def tiny(factory) -> Tiny:
    "`paused/run` after three updates, `done/run` the same run at its end, `other/run` one of another learning rate after three updates."
    if not MADE: MADE['tiny'] = make(factory.mktemp('tiny'))
    return MADE['tiny']


def make(folder) -> Tiny:
    trainer.save_example_model(folder/'model')
    runs = {name: make_config(config(folder, folder/name/'run', dict(optimizer=dict(lr=lr)))) for name, lr in dict(paused=.01, done=.01, other=.02).items()}
    policy = trainer.load_policy(runs['paused'], 'cpu')
    trainer.prepare_cache(runs['paused'], folder/'cache', policy)
    for name in ('paused', 'other'): train(runs[name], stop_after_updates=PAUSE)
    shutil.copytree(folder/'paused', folder/'done')
    train(runs['done'])
    return Tiny(folder, policy)
