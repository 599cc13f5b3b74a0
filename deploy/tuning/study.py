"""A study: settings are tried one after the other, each chosen from how those before it did, and all are kept.

The search is Optuna's (https://optuna.org; Akiba et al., KDD 2019): its tree-structured Parzen estimator (Bergstra et
al., NeurIPS 2011), or every combination where there are no more than trials. Trials stand in a file, so that a study
goes on where it was stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import optuna
from optuna.samplers import TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from deploy.tuning.space import SearchSpace, Settings
from deploy.tuning.trials import FinishedTrial, TrialFailed

STUDY = "tune"
QUESTION, FIGURES, FAILURE = "question", "figures", "failure"
"""What is kept with a study, and with each of its trials."""


class StudyMismatch(Exception):
    """The folder has the trials of a study that asked something else."""


class Study:
    """Owns the trials of one folder."""

    def __init__(self, file: Path, space: SearchSpace, question: Mapping[str, Any], *, trials: int, seed: int) -> None:
        """`question`: all that the trials have in common; a study of another one is not gone on with: raises
        StudyMismatch. `trials`: how many there are to be in all."""
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._space, self._trials = space, trials
        file.parent.mkdir(parents=True, exist_ok=True)
        self._study = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(file))),
            study_name=STUDY,
            direction="maximize",
            load_if_exists=True,
        )
        asked = msgspec.json.encode(question, order="sorted").decode()
        if self._study.user_attrs.setdefault(QUESTION, asked) != asked:
            raise StudyMismatch(f"{file.parent}: has the trials of another question; choose another folder")
        self._study.set_user_attr(QUESTION, asked)
        # Where a study goes on, its first trials' random numbers are not drawn again.
        self._study.sampler = TPESampler(seed=seed + len(self.finished()), n_startup_trials=max(5, trials // 4))

    @property
    def wanted(self) -> int:
        """How many trials there are to be in all: never more than there are combinations."""
        return min(self._trials, self._space.size)

    def finished(self) -> list[FinishedTrial]:
        """Those that have ended, in their order."""
        ended = self._study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])
        return [
            FinishedTrial(number, each.params, each.user_attrs.get(FIGURES), each.user_attrs.get(FAILURE))
            for number, each in enumerate(ended, 1)
        ]

    def run(self, try_out: Callable[[Settings], Mapping[str, Any]]) -> Iterator[FinishedTrial]:
        """Yields each trial as it ends, until there are as many as wanted. `try_out` returns the figures of some
        settings, or raises TrialFailed. What was tried already is not tried again, and is no trial."""
        while len(tried := [each.settings for each in self.finished()]) < self.wanted:
            trial, settings = self._ask()
            if settings in tried or self._space.size <= self._trials:
                self._study.tell(trial, state=TrialState.PRUNED)
                self._study.enqueue_trial(next(each for each in self._space.combinations() if each not in tried))
                trial, settings = self._ask()
            try:
                figures = try_out(settings)
                trial.set_user_attr(FIGURES, dict(figures))
                value = float(figures["request_goodput"])
            except TrialFailed as failed:
                trial.set_user_attr(FAILURE, str(failed))
                value = -1.0  # not a failure for Optuna, which would learn nothing from it
            self._study.tell(trial, value)
            yield self.finished()[-1]

    def _ask(self) -> tuple[optuna.Trial, dict[str, str]]:
        trial = self._study.ask()
        return trial, {name: str(trial.suggest_categorical(name, each)) for name, each in self._space.values.items()}
