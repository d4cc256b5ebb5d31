"""What a visitor may ask for. Every value from outside passes here, whether a widget, a link or the API sent it.

Widgets limit what can be clicked, but the API takes any JSON: NaN, lists, paths, HTML. So the handlers get the raw
values (`preprocess=False`) and check them here. A refusal is an `LcsError` that names the value and what is allowed;
`guarded` shows it to the visitor, escaped, because Gradio renders error messages as HTML.
"""

from __future__ import annotations

import functools
import html
import inspect
import logging
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import gradio as gr

from lcs.conditioning import check_color, check_location
from lcs.errors import LcsError
from lcs.experiments import GRID
from lcs.sampling import SOLVERS

MAX_CONDITIONS = 12  # the paper's; more were never tested
MAX_SAMPLES = 8
MAX_STEPS = 64
MAX_SEED = 2**31 - 1
MAX_TEXT = 400  # characters of any text field
SHOWN = 60  # characters of a refused value that a message repeats

Conditions = tuple  # of (x, y) pairs, or of colour names

log = logging.getLogger("lcs.app")


# ---- single values --------------------------------------------------------------------------------


def _show(value) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else text[:SHOWN] + " ..."


def whole(value, name: str, low: int, high: int) -> int:
    """A whole number in low..high. True is no number, and neither is "3"."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value != int(value) or not low <= value <= high:
        raise LcsError(f"{name} must be a whole number from {low} to {high}, got {_show(value)}")
    return int(value)


def fraction(value, name: str) -> float:
    """A place along a side of the image, in [0, 1)."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 <= value < 1:  # also refuses NaN
        raise LcsError(f"{name} must be a number from 0 up to, but not including, 1; got {_show(value)}")
    return float(value)


def choice(value, name: str, allowed: Sequence):
    """One of `allowed`; compared by type too, so that True is not 1."""
    for one in allowed:
        if type(value) is type(one) and value == one:
            return one
    raise LcsError(f"{name} {_show(value)} is unknown; choose from {', '.join(map(str, allowed)) or 'nothing yet'}")


def text(value, name: str, limit: int = MAX_TEXT) -> str:
    if not isinstance(value, str):
        raise LcsError(f"{name} must be text, got {_show(value)}")
    if len(value) > limit:
        raise LcsError(f"{name} has {len(value)} characters; at most {limit}")
    return value


def seed(value) -> int:
    return whole(value, "the seed", 0, MAX_SEED - MAX_CONDITIONS)


def steps(value) -> int:
    return whole(value, "the number of steps", 1, MAX_STEPS)


def samples(value) -> int:
    return whole(value, "the number of samples", 1, MAX_SAMPLES)


def solver(value) -> str:
    return choice(value, "the solver", list(SOLVERS))


def flag(value, name: str) -> bool:
    if not isinstance(value, bool):
        raise LcsError(f"{name} must be true or false, got {_show(value)}")
    return value


def prompt(value) -> str:
    cleaned = " ".join(text(value, "the prompt").split())
    if not cleaned.isprintable():
        raise LcsError("the prompt holds characters that cannot be printed")
    return cleaned


# ---- conditions -----------------------------------------------------------------------------------


def conditions(value, conditioner: str) -> Conditions:
    """From text: "0.65,0.65; 0.65,0.25" for locations, "red; blue; blue" for colours."""
    value = text(value, "the list of conditions")
    found = _colors(value) if conditioner == "color" else _locations(value)
    if len(found) > MAX_CONDITIONS:
        raise LcsError(f"{len(found)} conditions are too many; at most {MAX_CONDITIONS}")
    return found


def _locations(value: str) -> Conditions:
    pairs = [re.split(r"[,\s]+", part.strip()) for part in re.split(r"[;\n]+", value) if part.strip()]
    for pair in pairs:
        if len(pair) != 2 or not all(re.fullmatch(r"[0-9]*\.?[0-9]+", number) for number in pair):
            raise LcsError(f"locations are written as x,y; x,y with numbers from 0 to 1; got {_show(', '.join(pair))}")
    return tuple(check_location(pair) for pair in pairs)


def _colors(value: str) -> Conditions:
    return tuple(check_color(word[:SHOWN]) for word in re.split(r"[;,\s]+", value) if word)


def as_text(found: Conditions) -> str:
    """The inverse of `conditions`."""
    return "; ".join(one if isinstance(one, str) else f"{one[0]:.4g},{one[1]:.4g}" for one in found)


def toggled(found: Conditions, x: float, y: float) -> Conditions:
    """The locations after a click: the clicked cell's centre is added, or all locations in that cell are removed."""
    row, column = int(fraction(y, "y") * GRID), int(fraction(x, "x") * GRID)
    kept = tuple(one for one in found if (int(one[1] * GRID), int(one[0] * GRID)) != (row, column))
    if len(kept) < len(found):
        return kept
    if len(found) >= MAX_CONDITIONS:
        raise LcsError(f"there are already {MAX_CONDITIONS} locations; click on one to remove it")
    return (*found, ((column + 0.5) / GRID, (row + 0.5) / GRID))


# ---- refusals -------------------------------------------------------------------------------------


def refusal(error: LcsError) -> gr.Error:
    return gr.Error(html.escape(str(error)), title="Not possible", print_exception=False)


def _defect(error: Exception) -> gr.Error:
    """An error nobody foresaw: the log gets the details, the visitor gets no path and no source line."""
    log.exception("handler failed", exc_info=error)
    return gr.Error("Something went wrong here; the server's log has the details.", print_exception=False)


@contextmanager
def _refusing() -> Iterator[None]:
    """Inside, every error becomes one that may be shown."""
    try:
        yield
    except gr.Error:
        raise
    except LcsError as error:
        raise refusal(error) from None
    except Exception as error:
        raise _defect(error) from None


def guarded(handler: Callable) -> Callable:
    """A handler or generator of updates whose refusals reach the visitor."""
    if inspect.isgeneratorfunction(handler):

        @functools.wraps(handler)
        def guarded_generator(*values):
            with _refusing():
                yield from handler(*values)

        return guarded_generator

    @functools.wraps(handler)
    def guarded_handler(*values):
        with _refusing():
            return handler(*values)

    return guarded_handler
