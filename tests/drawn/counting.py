"""How many programs of each kind there were, and what became of them: by feature and by reason."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from drawn.language import FEATURES, Program
from drawn.verdicts import BAD, KINDS, Verdict


@dataclass(frozen=True)
class Report:
    """One program's fate, as it travels from a worker.

    Attributes:
        remedied: whether it was refused and is equal as a refusal tells to write it.
    """

    program: Program
    verdict: Verdict
    backend: str = "threads"
    remedied: bool = False


def traits(program: Program) -> Iterator[str]:
    """What is around the function."""
    yield f"kind: {program.kind}"
    yield f"form: {program.form}"
    yield f"world: {program.world}"
    yield f"stage: {program.stage}"
    yield f"units: {'default' if program.units is None else 'given'}"
    yield f"optimizer: {program.optimizer}"
    for name in program.transforms:
        yield f"transform: {name}"
    for verb in {action.verb for action in program.actions}:
        yield f"verb: {verb}"


@dataclass
class Tally:
    """Counts of reports."""

    kinds: Counter[str] = field(default_factory=Counter)
    backends: Counter[str] = field(default_factory=Counter)
    features: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    around: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    reasons: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    hopeless: Counter[str] = field(default_factory=Counter)  # refused without a remedy that works, by reason
    seeds: dict[tuple[str, str], list[int]] = field(default_factory=lambda: defaultdict(list))
    told: Counter[str] = field(default_factory=Counter)  # features drawn as a refusal tells to write them

    def add(self, report: Report) -> None:
        kind, reason = report.verdict.kind, report.verdict.reason
        self.kinds[kind] += 1
        self.backends[report.backend] += 1
        if kind == "uncounted":
            self.reasons[kind][reason] += 1
            return
        for name in {statement.feature for statement in report.program.statements}:
            self.features[name][kind] += 1
        self.told.update(statement.feature for statement in report.program.statements if statement.remedied)
        for name in traits(report.program):
            self.around[name][kind] += 1
        if kind != "equal":
            self.reasons[kind][reason] += 1
            self.seeds[kind, reason].append(report.program.seed)
        self.hopeless[reason] += kind == "refused" and not report.remedied

    @property
    def counted(self) -> int:
        return sum(self.kinds.values()) - self.kinds["uncounted"]

    @property
    def bad(self) -> int:
        return sum(self.kinds[kind] for kind in BAD)

    def summary(self) -> str:
        said = ", ".join(f"{self.kinds[kind]} {kind}" for kind in KINDS if self.kinds[kind])
        share = 100 * self.kinds["refused"] / max(1, self.counted)
        return f"{sum(self.kinds.values())} programs: {said} ({share:.1f} % of those counted refused)"

    def table(self, seeds: int = 5) -> str:
        """By feature, by what is around, by reason; with the first seeds of what is wrong."""
        out = [self.summary() + "; " + ", ".join(f"{n} on {b}" for b, n in self.backends.items()), ""]
        out += self._rows("feature", {name: self.features[name] for name in FEATURES})
        if self.told:
            out += ["", "drawn as a refusal tells to write them:"]
            out += [f"  {n:6} of {sum(self.features[f].values()):6}  {f}" for f, n in self.told.most_common()]
        out += ["", *self._rows("around", dict(sorted(self.around.items())))]
        for kind in (*BAD, "refused", "uncounted"):
            if self.reasons[kind]:
                out += ["", f"{kind}, by reason:"]
            for reason, count in self.reasons[kind].most_common():
                out.append(f"  {count:6}  {reason}")
                if self.seeds[kind, reason]:
                    out.append(f"          seeds {' '.join(map(str, self.seeds[kind, reason][:seeds]))}")
                if kind == "refused" and self.hopeless[reason]:
                    out.append(f"          without a remedy: {self.hopeless[reason]}")
        return "\n".join(out)

    def _rows(self, title: str, rows: dict[str, Counter[str]]) -> list[str]:
        columns: Sequence[str] = [kind for kind in KINDS if kind != "uncounted"]
        out = [f"{title:<60}{'share':>7}" + "".join(f"{kind:>9}" for kind in columns)]
        for name, counts in sorted(rows.items(), key=lambda row: sum(row[1].values())):
            total = sum(counts.values())
            share = 100 * total / max(1, self.counted)
            out.append(f"{name:<60}{share:6.1f}%" + "".join(f"{counts[kind]:9}" for kind in columns))
        return out

    def rare(self, percent: float = 5.0) -> list[str]:
        """Features that too few programs have."""
        return [name for name in FEATURES if 100 * sum(self.features[name].values()) < percent * max(1, self.counted)]
