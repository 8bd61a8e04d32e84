"""A call of a unit is begun anew when a run showed more of it, as which tensors in objects it reads."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import NamedTuple

import torch

from fzero.base import private
from fzero.base.refusals import noted
from fzero.capture.handle import REQUIRES_GRAD, Function, Named, Operands, StandIn

_DETACHED = {torch.Tensor.detach, torch.Tensor.data.__get__}  # type: ignore[attr-defined]


class Facts(NamedTuple):
    """The facts that an earlier run showed of one call of a unit, beside the leaves that it is given."""

    mutated: frozenset[int] = frozenset()  # positions among its tensors of those that it changes in place
    more: tuple[int, ...] = ()  # indices of leaves that it reads although it is not given them
    read: frozenset[int] = frozenset()  # places among the tensors that lie in objects of those that it reads
    # positions of the tensors that it returns, or views of, where it will be run again: the caller may change them
    returned: frozenset[int] = frozenset()
    draws: bool = False  # from random generators that are Python's or numpy's own
    # with tensors of functorch levels that have ended, which only a look at each operation tells from those that go on
    watched: bool = False
    # its operations do not say all that it does, as it opens memory to others: it is recomputed as a whole
    whole: bool = False
    kept: bool = False  # neither do they, and it sends messages, which other ranks do not repeat: all is kept
    joint: Mapping[int, frozenset[int]] = {}  # place of a tensor that it puts out -> others that depend on it inside
    users: bool = False  # whether backwards of users' own are called where it is pulled back

    def __str__(self) -> str:
        said = {
            "it changes an input in place": self.mutated,
            "it reads leaves that it is not given": self.more,
            "it reads a tensor that lies in an object": self.read,
            "it returns one of its inputs": self.returned,
            "it draws from generators of Python's or numpy's own": self.draws,
            "it uses tensors of a level of torch.func that has ended": self.watched,
            "its operations do not say all that they compute": self.whole,
        }
        return " and ".join(words for words, showed in said.items() if showed) or "it showed more of itself"

    def joined(self, showed: Facts) -> Facts:
        """These, and what another run showed."""
        return Facts(
            *(self.mutated | showed.mutated, (*self.more, *showed.more), self.read | showed.read),
            *(self.returned | showed.returned, self.draws or showed.draws, self.watched or showed.watched),
            *(self.whole or showed.whole, self.kept or showed.kept, self.joint, self.users),
        )


class Again(BaseException):
    """A call is run once more, now that this is known of it too. Nothing that an `except Exception` should catch."""

    def __init__(self, showed: Facts) -> None:
        self.showed = showed


class Unread(StandIn):
    """Stands in an object for a tensor from outside; who reads it makes it one of the unit's inputs.

    What a unit does not read it does not depend on: a loss of the last step that is still kept somewhere, say.
    """

    readable = StandIn.readable - {REQUIRES_GRAD}
    place: int
    tensor: torch.Tensor
    thread: int

    @staticmethod
    def __new__(cls: type[Unread], tensor: torch.Tensor, place: int) -> Unread:
        return cls.like(tensor, tensor=tensor, place=place, thread=threading.get_ident())

    @classmethod
    def __torch_function__(cls, func: Function, types: object, args: Operands = (), kwargs: Named = None) -> object:
        if func in _DETACHED and not (private.level() or private.is_wrapper(own := cls.first(args, kwargs).tensor)):
            return own.detach()  # a constant, as the last step's state is that is carried on
        return super().__torch_function__(func, types, args, kwargs)

    def refusal(self, func: object) -> BaseException:
        if self.thread != threading.get_ident():
            return noted(
                ValueError(
                    f"A tensor of shape {tuple(self.shape)} lies in an object that units on two threads share (a "
                    "global memo, say, and ranks that are threads), and one of them reads what the other has put there "
                    "for itself. Keep the object in the module, or run ranks as processes."
                )
            )
        return noted(Again(Facts(read=frozenset({self.place}))))
