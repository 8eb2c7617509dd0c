"""Schedule of a soak (`soak.py`): what disturbs which iteration. A seed decides everything."""

from __future__ import annotations

import dataclasses
import random

# Events in 1,000 iterations, by kind. A run has each of them at least once.
RATES = {
    "kill": 5.0,
    "kill at start": 2.0,
    "stop": 8.0,
    "hang": 3.0,
    "terminate": 4.0,
    "crash": 5.0,
    "restart": 10.0,
    "retry": 20.0,
}
MEANING = {
    "kill": "SIGKILL of one rank",
    "kill at start": "SIGKILL of one rank before its first iteration",
    "stop": "SIGSTOP of one rank, SIGCONT before the timeout",
    "hang": "SIGSTOP of one rank until the job has ended",
    "terminate": "SIGTERM to all ranks: they save, exit and are started again",
    "crash": "an exception on one rank ends its process",
    "restart": "an exception on one rank, restart in the same processes",
    "retry": "an exception on all ranks, the iteration is repeated",
}
# Kinds whose signals the supervisor sends, and kinds whose exceptions ranks raise.
SIGNALS = ("kill", "kill at start", "stop", "hang", "terminate")
EXCEPTIONS = ("crash", "restart", "retry")
# Iterations that have room for an event of each kind.
FEWEST = 60
# Kinds after which a new attempt loads a checkpoint.
ENDING = ("kill", "kill at start", "hang", "terminate", "crash", "restart")
PLACES = ("data iterator", "router", "experts", "backward", "optimizer step")
MOST_MICROBATCHES = 3
# Iterations between two checkpoints.
SAVES = (8, 30)
EVALUATED = 0.06
# Probability that an iteration has another number of microbatches than the one before.
CHANGED = 0.3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """One disturbance.

    Args:
        number: index in the schedule.
        kind: key of `RATES`.
        iteration: iteration in which it happens, from 0 on.
        rank: rank that it happens to.
        delay: seconds between the iteration's begin and a signal; for "kill at start" between the
            start of the processes and the signal.
        seconds: duration of a stop.
        place: where an exception is raised, one of `PLACES`.
        layer: index of the MoE layer that raises.
        microbatch: random number that selects the microbatch that raises.
    """

    number: int
    kind: str
    iteration: int
    rank: int
    delay: float
    seconds: float
    place: str
    layer: int
    microbatch: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything that a seed decides.

    Args:
        events: disturbances, by iteration.
        saves: "sync" or "async" by the iteration after which a checkpoint is saved.
        evaluations: iterations after which the model is evaluated.
        microbatches: number of microbatches, by iteration.
    """

    events: tuple[Event, ...]
    saves: dict[int, str]
    evaluations: frozenset[int]
    microbatches: tuple[int, ...]

    @staticmethod
    def make(*, seed: int, iterations: int, ranks: int) -> Plan:
        """Draw a plan; the same arguments give the same plan in every process."""
        draw = random.Random(seed)
        microbatches = [draw.randint(1, MOST_MICROBATCHES)]
        for _ in range(iterations - 1):
            changed = draw.random() < CHANGED
            microbatches.append(draw.randint(1, MOST_MICROBATCHES) if changed else microbatches[-1])
        evaluations = {i for i in range(iterations) if draw.random() < EVALUATED}
        saves: dict[int, str] = {}
        at = draw.randint(*SAVES)
        while at < iterations:
            saves[at] = draw.choice(("sync", "async"))
            at += draw.randint(*SAVES)
        events = _draw_events(draw, iterations=iterations, ranks=ranks)
        return Plan(events, saves, frozenset(evaluations), tuple(microbatches))


def _draw_events(draw: random.Random, *, iterations: int, ranks: int) -> tuple[Event, ...]:
    """Draw events in different iterations.

    No attempt is ended in the tenth of the run after its first half, so that long attempts exist,
    too. A "kill at start" waits for a start that another event causes, so it is due before.
    """
    free = list(range(4, iterations - 4, 2))
    draw.shuffle(free)
    quiet = range(iterations // 2, iterations // 2 + iterations // 10)
    found: list[Event] = []
    for kind, rate in RATES.items():
        for _ in range(max(1, round(rate * iterations / 1000))):
            last = quiet.start if kind == "kill at start" else iterations
            at = next(i for i in free if i < last and (kind not in ENDING or i not in quiet))
            free.remove(at)
            found.append(_draw_event(draw, kind, iteration=at, ranks=ranks))
    found.sort(key=lambda event: event.iteration)
    return tuple(dataclasses.replace(event, number=i) for i, event in enumerate(found))


def _draw_event(draw: random.Random, kind: str, *, iteration: int, ranks: int) -> Event:
    delays = {"kill at start": (0.2, 4.0), "stop": (0.0, 0.3)}
    # Stock Megatron cannot repeat a backward that was broken off while gradients were reduced.
    places = [place for place in PLACES if kind != "retry" or place != "backward"]
    return Event(
        number=-1,
        kind=kind,
        iteration=iteration,
        rank=draw.randrange(ranks),
        delay=draw.uniform(*delays.get(kind, (0.0, 0.6))),
        seconds=draw.uniform(0.5, 4.0),
        place=draw.choice(places),
        layer=draw.randrange(2),
        microbatch=draw.randrange(MOST_MICROBATCHES),
    )
