"""The two cores of an LNC=2 launch take turns: one runs until it must wait for the other.

Only one runs at a time, so a launch is deterministic. The first core runs in the thread of the caller; the second
gets a thread of its own when the first waits for it for the first time, so a kernel without ``core_barrier`` or
``sendrecv`` costs no thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from .errors import NKIError


@dataclass(frozen=True)
class Meeting:
    """Where a core waits for the other. ``what`` must be equal on both; ``sent`` is for the other core."""

    what: str
    sent: object = None


class _Abandoned(BaseException):
    """Ends the kernel of a core because the other one failed. Not an Exception: a kernel must not catch it."""


class Turns:
    """Runs two cores, ``order[0]`` first in every stretch between two meetings."""

    def __init__(self, order: tuple[int, int], run: Callable[[int], None], met: Callable[[], None]):
        """``run(index)`` runs the kernel on a core, ``met()`` is called where both have arrived or ended."""
        self._order = order
        self._run = run
        self._met = met
        self._waits: dict[int, Meeting] = {}
        self._ended: set[int] = set()
        self._error: BaseException | None = None
        self._abandon = False
        self._thread: threading.Thread | None = None
        self._turn = {index: threading.Semaphore(0) for index in order}

    def run(self) -> None:
        """Run both cores to their ends.

        Raises:
            NKIError: a core broke a rule, or waits for the other one, which ended or waits elsewhere.
        """
        first, second = self._order
        try:
            self._run(first)
            self._ended.add(first)
            if self._thread is None:
                self._run(second)
            else:
                self._hand_over(first, second)
        except _Abandoned:
            pass
        except BaseException:
            self._abandon = True
            self._turn[second].release()
            raise
        finally:
            if self._thread is not None:
                self._thread.join()
        if self._error is not None:
            raise self._error
        self._met()

    def meet(self, index: int, meeting: Meeting) -> Meeting:
        """Core ``index`` waits here for the other one; what that one brought."""
        first, second = self._order
        if index == first:
            self._waits[first] = meeting
            self._hand_over(first, second)
            if second in self._ended:
                raise self._alone(first, meeting)
            return self._waits[second]
        if first in self._ended or first not in self._waits:
            raise self._alone(second, meeting)
        brought = self._waits[first]
        if brought.what != meeting.what:
            raise NKIError(
                "core-meeting", f"core {second} waits at {meeting.what}, core {first} waits at {brought.what}"
            )
        self._met()
        self._waits[second] = meeting
        self._turn[first].release()
        self._turn[second].acquire()
        if self._abandon:
            raise _Abandoned
        return brought

    def _hand_over(self, first: int, second: int) -> None:
        """The second core runs until it waits or ends."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._second, args=(first, second), name=f"core {second}")
            self._thread.start()
        else:
            self._turn[second].release()
        self._turn[first].acquire()
        if self._error is not None:
            raise _Abandoned

    def _second(self, first: int, second: int) -> None:
        try:
            self._run(second)
        except _Abandoned:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self._ended.add(second)
            self._turn[first].release()

    @staticmethod
    def _alone(index: int, meeting: Meeting) -> NKIError:
        return NKIError(
            "core-meeting", f"core {index} waits at {meeting.what} for core {1 - index}, which ended without it"
        )
