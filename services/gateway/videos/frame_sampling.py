"""Which frames of a video are looked at: those that `sample_frames` of the library's processors chooses, which ask for
torchvision. No file, no codec."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from shared.messages.model_card import FrameSampling, VideoModel

_PACES = ((30, 3.0), (300, 1.0), (math.inf, 0.5))
"""GLM-4.6V's: seconds that a video lasts at most, and pairs of frames that are looked at of each then."""
_PACED_S = 2400.0
"""Seconds beyond which a video gets no further frames."""
_SKIPPED_S = 1
"""Seconds at both ends of a long one (SmolVLM)."""


def frame_numbers(total: int, rate: float, how: VideoModel) -> list[int]:
    """Which of a video's `total` frames, at least one, are looked at. `rate`: frames of a second."""
    return _SAMPLINGS[how.sampling](total, rate, how)


def _by_ends(total: int, rate: float, how: VideoModel) -> list[int]:
    """Qwen3-VL's."""
    count = min(max(int(total / rate * how.fps), how.min_frames), how.max_frames, total)
    if count == 1:
        return [0]
    step = (total - 1) / (count - 1)
    return [round(each * step) for each in range(count)]


def _by_steps(total: int, rate: float, how: VideoModel) -> list[int]:
    """Qwen2-VL's."""
    most = min(how.max_frames, total) // 2 * 2
    count = int(min(max(total / rate * how.fps, how.min_frames), most, total)) // 2 * 2
    if not count:
        return [0]
    step = total / count  # which may be a little less than it is, so that there is one more than `count`, as theirs is
    return [min(int(each * step), total - 1) for each in range(math.ceil(total / step))]


def _by_seconds(total: int, rate: float, how: VideoModel) -> list[int]:
    """GLM-4.1V's, whose `max_duration` is as long as `max_frames` last."""
    seconds, last = total / rate, total - 1
    if seconds <= how.max_frames / how.fps:
        count = max(int(seconds * how.fps), 1)
        return _even_many(min(last, math.ceil(each * rate / how.fps)) for each in range(count))
    if how.max_frames >= total:
        return _even_many(range(total))
    return _even_many(min(last, math.ceil(time * rate)) for time in _spread(0, seconds, how.max_frames))


def _by_paces(total: int, rate: float, how: VideoModel) -> list[int]:
    """GLM-4.6V's."""
    seconds = total / rate
    lasts = min(seconds, _PACED_S)
    return _at_pace(total, rate, how.together * next(pace for most, pace in _PACES if lasts <= most), lasts, how)


def _by_pace(total: int, rate: float, how: VideoModel) -> list[int]:
    """GLM-5-Next's, whose `max_duration` is as long as `max_frames` last."""
    return _at_pace(total, rate, how.fps, total / rate, how)


def _at_pace(total: int, rate: float, pace: float, lasts: float, how: VideoModel) -> list[int]:
    """`pace`: of each second. `lasts`: seconds of which as many count."""
    seconds, count = total / rate, min(int(lasts * pace), how.max_frames)
    if total < count:
        return _even_many(range(total))
    numbers, wanted = list[int](), 0.0
    for number in range(total):
        if number * (1 / rate) >= wanted:
            wanted += 1 / pace
            numbers.append(number)
            if wanted >= int(seconds):
                break
    if len(numbers) < count:
        numbers = [int(each) for each in _spread(numbers[0], numbers[-1], count)]
    elif len(numbers) > count:
        numbers = [int(each) for each in _spread(0, total - 1, count)]
    return _even_many(numbers or [0])


def _by_inner(total: int, rate: float, how: VideoModel) -> list[int]:
    """SmolVLM's."""
    seconds, first, last = total / rate, 0, total - 1
    if seconds - 2 * _SKIPPED_S > how.max_frames * how.fps:
        first, last = int(_SKIPPED_S * rate), min(int(total - _SKIPPED_S * rate), last)
    if first >= last:
        first, last = 0, total - 1
    count = max(min(round(how.fps * seconds), how.max_frames), 1)
    return sorted({int(each) for each in _spread(first, last, count)})


def _by_shares(total: int, rate: float, how: VideoModel) -> list[int]:
    """What the library does where no processor has a way of its own."""
    count = min(how.max_frames, total)
    return [each * total // count for each in range(count)]


def _by_middles(total: int, rate: float, how: VideoModel) -> list[int]:
    """InternVL's."""
    count = min(how.max_frames, total)
    return [(2 * each + 1) * total // (2 * count) for each in range(count)]


def _even_many(numbers: Iterable[int]) -> list[int]:
    """Each once, the last of an odd number twice."""
    once = list(dict.fromkeys(numbers))
    return once + once[-1:] * (len(once) % 2)


def _spread(first: float, last: float, count: int) -> list[float]:
    """So many from `first` to `last`, as `numpy.linspace` has them."""
    if count < 2:
        return [float(first)] * count
    step = (last - first) / (count - 1)
    return [*(each * step + first for each in range(count - 1)), float(last)]


_SAMPLINGS: dict[FrameSampling, Callable[[int, float, VideoModel], list[int]]] = {
    "ends": _by_ends,
    "steps": _by_steps,
    "seconds": _by_seconds,
    "paces": _by_paces,
    "shares": _by_shares,
    "middles": _by_middles,
    "pace": _by_pace,
    "inner": _by_inner,
}
