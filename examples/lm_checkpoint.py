"""Checkpoints of `train_lm.py`: the train state, and what the report at the end needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import orbax.checkpoint as ocp


class Progress(NamedTuple):
    """A run so far."""

    state: Any
    losses: list[float]
    held_out: dict[int, float]


class Checkpoints:
    """The last two checkpoints of a run, in a folder; with no folder, nothing is kept.

    A process that is killed while it saves leaves the previous one, which is then restored.

    Raises:
      SystemExit: If the folder holds a run that is not to be resumed, or one of other settings.
    """

    def __init__(self, folder: Path | None, settings: dict[str, Any], *, resume: bool) -> None:
        self.settings = settings
        self.manager = None
        if folder is not None:
            options = ocp.CheckpointManagerOptions(max_to_keep=2)
            self.manager = ocp.CheckpointManager(folder.absolute(), options=options)
            if self.manager.latest_step() is not None and not resume:
                raise SystemExit(f"train_lm.py: {folder} holds a run; --resume continues it")

    def restore(self, start: Progress) -> Progress:
        """The last checkpoint, or `start` where there is none."""
        if self.manager is None or (step := self.manager.latest_step()) is None:
            return start
        # The settings first: another size has a state of other shapes.
        kept = self.manager.restore(step, args=ocp.args.Composite(curves=ocp.args.JsonRestore()))
        if kept.curves["settings"] != self.settings:
            raise SystemExit(
                f"train_lm.py: the run in {self.manager.directory} was started with "
                f"{kept.curves['settings']}, and this one is {self.settings}"
            )
        shapes = jax.eval_shape(lambda: start.state)
        arrays = ocp.args.Composite(state=ocp.args.StandardRestore(shapes))
        held_out = {int(step): loss for step, loss in kept.curves["held_out"].items()}
        state = self.manager.restore(step, args=arrays).state
        return Progress(state, kept.curves["losses"], held_out)

    def save(self, progress: Progress) -> None:
        """Saves in the background; the values are copied before it returns."""
        if self.manager is not None:
            curves = {"losses": [*progress.losses], "held_out": {**progress.held_out}}
            args = ocp.args.Composite(
                state=ocp.args.StandardSave(progress.state),
                curves=ocp.args.JsonSave(curves | {"settings": self.settings}),
            )
            self.manager.save(len(progress.losses), args=args)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.manager is not None:
            self.manager.close()  # waits until the last one is written
