"""A reward by a column of the prompt file, as GenEval checks colours: whether a video
shows the colour that its row names.

`colour.yaml`, laid over a preset by `PYTHONPATH=examples sage-fast train toy_cpu
colour.yaml`:

    data: {prompts: colours.csv}
    evaluation: {prompts: colours.csv}
    reward:
      rewards: ["column_colour:ColumnColour"]
      weights: {colour: 1.0}

`colours.csv`; the reward looks at the column, and not at the prompt:

    prompt,colour
    a red circle moving left,red
    a green square moving up,green
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

COLOURS = {"red": (1, 0, 0), "green": (0, 1, 0), "blue": (0, 0, 1)}


class ColumnColour:
    """Gives the share of the coloured pixels that have the colour asked for, as the
    score `colour`, from 0 to 1.

    Args:
        column: of the prompt file, with red, green or blue.
    """

    def __init__(self, column: str = "colour") -> None:
        self.column = column

    def score_samples(self, samples: Sequence[Any]) -> dict[str, list[float]]:
        """{"colour": B numbers} of B `RewardSample`s. ValueError for a prompt without
        such a colour.
        """
        return {"colour": [self._share(sample) for sample in samples]}

    def _share(self, sample: Any) -> float:
        wanted = sample.columns.get(self.column)
        if wanted not in COLOURS:
            raise ValueError(
                f"The column {self.column!r} of the prompt {sample.prompt!r} is "
                f"{wanted!r}. Write one of {', '.join(COLOURS)} there."
            )
        strong = np.asarray(sample.video) > 127  # (F, 3, H, W)
        coloured = strong.any(axis=1) & ~strong.all(axis=1)
        asked = np.array(COLOURS[wanted], bool).reshape(3, 1, 1)
        found = (strong == asked).all(axis=1)
        return float(found.sum() / max(1, coloured.sum()))
