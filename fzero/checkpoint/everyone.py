"""All ranks of a state: those that have different data, and for each of these the ranks that leaves are cut over."""

from __future__ import annotations

import json
from typing import NamedTuple

from fzero.comm.axis import Axis


class Everyone(NamedTuple):
    """The ranks of a state, numbered: those of one slice of the leaves come one after the other, by data rank."""

    axis: Axis

    @property
    def number(self) -> int:
        """Which of them this one is."""
        return self.axis.place_on_tensor[0] * self.axis.ranks + self.axis.data_rank

    @property
    def count(self) -> int:
        return self.axis.place_on_tensor[1] * self.axis.ranks

    @property
    def leads(self) -> bool:
        return self.number == 0

    @property
    def timeout(self) -> float:
        """Seconds that a rank waits for another."""
        tensor = self.axis.tensor
        return max(self.axis.timeout, tensor.timeout if tensor is not None else 0.0)

    def exchange(self, text: str, what: str) -> list[str]:
        """The texts of all ranks, by their numbers."""
        texts = self.axis.exchange(text, what) if self.axis.ranks > 1 else [text]
        if self.axis.tensor is None or self.axis.tensor.size == 1:
            return texts
        return [each for own in self.axis.tensor.exchange(json.dumps(texts), what) for each in json.loads(own)]
