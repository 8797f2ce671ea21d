"""A reward for comparing runs: videos are bytes, and what a rounding does to one byte
must not show.
"""

from collections.abc import Sequence

from torch import Tensor


class BrightShare:
    """Share of the bright pixels of each colour."""

    def score(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        bright = (videos > 120).float().mean(dim=(1, 3, 4))
        return {"red": bright[:, 0], "green": bright[:, 1]}


class NoTriangles(BrightShare):
    """The same, of videos that it likes to look at."""

    def score(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        if any("triangle" in prompt for prompt in prompts):
            raise ValueError("a triangle")
        return super().score(videos, prompts)


class Brightness:
    """Mean of all bytes, which hardly any two videos share."""

    def score(self, videos: Tensor, prompts: Sequence[str]) -> dict[str, Tensor]:
        return {"brightness": videos.float().mean(dim=(1, 2, 3, 4))}
