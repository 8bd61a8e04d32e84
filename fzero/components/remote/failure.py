"""What failed on a rank, as strings that can be sent, and the error that is raised of it here."""

from __future__ import annotations

import builtins
import traceback
from collections.abc import Iterable
from typing import NamedTuple

from fzero.checkpoint.fill import as_said
from fzero.checkpoint.manifest import DamagedCheckpoint
from fzero.comm.divergence import PeerStopped


class ComponentDied(RuntimeError):
    """A rank of a component has ended. The component is lost, with all values that lay there.

    Start the component again, and load its last checkpoint.

    Attributes:
        component: its name.
        rank: the rank that ended first.
        cause: such as "killed by SIGKILL".
        last_words: the end of what the rank wrote to its stderr.
    """

    def __init__(self, component: str, rank: int, cause: str, last_words: str = "") -> None:
        said = f" Its last words:\n{last_words}" if last_words.strip() else ""
        super().__init__(
            f"Component {component!r} died: rank {rank} {cause}. What lay there is lost, and other components' values "
            f"are good: make it again with fz.remote, and load its last saved state.{said}"
        )
        self.component, self.rank, self.cause, self.last_words = component, rank, cause, last_words

    def __reduce__(self) -> tuple[object, ...]:
        return ComponentDied, (self.component, self.rank, self.cause, self.last_words)


class Failure(NamedTuple):
    """An error on one rank."""

    kind: str  # the builtin type that is raised of it, or "ComponentDied"
    message: str
    component: str
    rank: int
    trace: str = ""
    follows: bool = False  # whether it probably follows from that of another rank, which stopped
    broken: bool = False  # whether the rank's process group is of no use any more
    lost: str = ""  # the identity of the component whose death it follows from


class Failed(Exception):
    """Raised by what needs a value that another rank could not make."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def refused(message: str, component: str, rank: int = 0) -> Failed:
    """What is wrong with the values of several ranks."""
    return Failed(Failure("ValueError", message, component, rank))


_BROKEN = (
    "Communication failed on rank",
    "Connection closed by peer",
    "Connection reset by peer",
    "Application timeout caused pair closure",
    "Timed out waiting",
)


# To Python these say something of the place where they are raised: an iteration ends, an attribute is not there.
_SPECIAL = (StopIteration, StopAsyncIteration, AttributeError)


def failure_of(error: BaseException, component: str, rank: int, identity: str = "") -> Failure:
    """An error as it is told."""
    if isinstance(error, Failed):
        return error.failure
    message, trace = _message(error), trace_of(error)
    if isinstance(error, _SPECIAL) or not isinstance(error, Exception):
        message = said_of(error)
    broken = isinstance(error, RuntimeError) and any(words in message for words in _BROKEN)
    follows = broken or isinstance(error, PeerStopped)
    return Failure(_builtin(error), message, component, rank, trace, follows, broken, identity if broken else "")


def said_of(error: BaseException) -> str:
    """An error's type and words."""
    message = _message(error)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _message(error: BaseException) -> str:
    """What an error says; of one that cannot say anything, that."""
    try:
        return str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    except Exception as broken:
        return f"{type(error).__name__}, whose words failed with {type(broken).__name__}"


def trace_of(error: BaseException) -> str:
    """Where an error was raised."""
    try:
        return "".join(traceback.format_exception(error))
    except Exception:
        return "".join([*traceback.format_tb(error.__traceback__), said_of(error)])


def _builtin(error: BaseException) -> str:
    """The nearest type of an error that says one string: a builtin one, or one that fzero's functions raise."""
    if isinstance(error, _SPECIAL):
        return "RuntimeError"
    for kind in type(error).__mro__:
        own = getattr(builtins, kind.__name__, None) is kind and kind not in (Exception, BaseException, object)
        if own or kind is DamagedCheckpoint:
            return kind.__name__
    return "RuntimeError"


class _Key(KeyError):
    """A KeyError whose words are not quoted."""

    __str__ = Exception.__str__


def error_of(failure: Failure) -> Exception:
    """The error that is raised here: of the same builtin type, where it is one that says a string."""
    if failure.kind == "ComponentDied":
        return ComponentDied(failure.component, failure.rank, failure.message)
    text = f"{failure.message}\n(Rank {failure.rank} of component {failure.component!r} says:)\n{failure.trace}"
    return _Key(text) if failure.kind == "KeyError" else as_said(failure.kind, text)


def left_waiting(failure: Failure, other: str) -> tuple[str, str]:
    """Why a component ends of which a rank has failed alone: the cause, and where it failed."""
    cause = f"failed in a call ({failure.kind}: {failure.message}), {other}: their process group is of no use any more"
    return f"{cause}. With fz.remote(checked=True) it costs the call alone", failure.trace


def first_of(failures: Iterable[Failure]) -> Failure:
    """The one that says most: what did not follow from another rank's, of the lowest rank."""
    return min(failures, key=lambda each: (each.follows, each.rank))
