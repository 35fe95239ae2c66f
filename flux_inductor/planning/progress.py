"""Whether jobs that wait for one another all come to their ends, by simulation (rule R1).

What is simulated
    Queues of jobs, each with any number >= 1 of workers. A worker takes the next job of its queue, does its
    steps one after another, and takes the next; it may hold some jobs ahead of the one that it works on. A
    step begins when all that it waits for has been counted often enough, and is counted itself when done.
      CPU engine            one worker multiplies, job by job; one moves chunks.
      kernels, claims       jobs are tiles; workers are the resident clusters, each with a claim ahead.
      kernels, fixed order  jobs are the tiles of one cluster; workers are those that are resident at a time.
      copy engine           one worker; each copy is a job.

Why the serial run proves all others
    In the serial run each queue has one worker, which does everything in order. Say that it comes to its end,
    but some other run, with any workers, has stopped. Take the first step in the order of the serial run
    that the other has not done. All that comes before it has happened there: what it waits for, and all
    earlier steps of its queue. So no worker of the queue is held up by an earlier step, each of the earlier
    jobs is taken, and this step's job is the next to be taken or is: a worker can do it. So the run has not
    stopped.
    The tests run others, with few and many workers and random interleavings, as a check on this argument.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

Event: TypeAlias = Hashable


@dataclass(frozen=True)
class Wait:
    """Until an event has been counted `count` times.

    Args:
        name: of what is waited for, for people.
    """

    event: Event
    name: str
    count: int = 1


@dataclass(frozen=True)
class Step:
    """What is done in one piece.

    Args:
        counts: events, each of which it counts once when it is done.
    """

    name: str
    waits: tuple[Wait, ...] = ()
    counts: tuple[Event, ...] = ()


Job: TypeAlias = tuple[Step, ...]


@dataclass(frozen=True)
class Queue:
    """Jobs in the order in which workers take them.

    Args:
        name: of the queue and its workers, for people.
        several: whether it may have more than one worker.
        ahead: jobs that a worker may hold ahead of the one that it works on.
    """

    name: str
    jobs: tuple[Job, ...]
    several: bool = False
    ahead: int = 0


@dataclass
class Worker:
    """Args: `held`, jobs taken; `done`, steps of the first of them that are done."""

    queue: int
    held: deque[Job] = field(default_factory=deque)
    done: int = 0


class Simulation:
    """One run.

    Args:
        workers: of each queue.
    """

    def __init__(self, queues: Sequence[Queue], workers: Sequence[int]) -> None:
        pairs = zip(workers, queues, strict=True)
        assert all(count == 1 or (count > 1 and queue.several) for count, queue in pairs), workers
        self._queues = queues
        self._taken = [0] * len(queues)
        self._counted: Counter[Event] = Counter()
        self._waiting: defaultdict[Event, list[Worker]] = defaultdict(list)
        self.workers = [Worker(index) for index, count in enumerate(workers) for _ in range(count)]

    def run(self) -> None:
        """Until nothing moves any more."""
        ready = deque(self.workers)
        while ready:
            worker = ready.popleft()
            while self.advance(worker):
                for event in self._news:
                    ready.extend(self._waiting.pop(event, ()))
            missing = self._missing(worker)
            if missing is not None:
                self._waiting[missing.event].append(worker)

    def advance(self, worker: Worker) -> bool:
        """Lets a worker do its next step, or take a job, if it can; whether it did."""
        self._news: tuple[Event, ...] = ()
        if worker.held and self._missing(worker) is None:
            step = worker.held[0][worker.done]
            worker.done += 1
            if worker.done == len(worker.held[0]):
                worker.held.popleft()
                worker.done = 0
            self._counted.update(step.counts)
            self._news = step.counts
            return True
        queue, taken = self._queues[worker.queue], self._taken[worker.queue]
        if taken == len(queue.jobs) or len(worker.held) > queue.ahead:
            return False
        self._taken[worker.queue] += 1
        worker.held.append(queue.jobs[taken])
        return True

    def _missing(self, worker: Worker) -> Wait | None:
        """What the worker's next step still waits for, or the first of it."""
        if not worker.held:
            return None
        waits = worker.held[0][worker.done].waits
        return next((wait for wait in waits if self._counted[wait.event] < wait.count), None)

    @property
    def finished(self) -> bool:
        idle = not any(worker.held for worker in self.workers)
        return idle and all(
            taken == len(queue.jobs) for taken, queue in zip(self._taken, self._queues, strict=True)
        )

    def stuck(self) -> str:
        """What every queue stands at, for people."""
        lines = []
        for worker in self.workers:
            wait = self._missing(worker)
            if wait is not None:
                step = worker.held[0][worker.done]
                lines.append(f"{self._queues[worker.queue].name} is at {step.name}, waits for {wait.name}")
        for taken, queue in zip(self._taken, self._queues, strict=True):
            left = [job[0].name for job in queue.jobs[taken:]]
            if left:
                lines.append(f"{queue.name} has not begun {some(left)}")
        return "\n".join(lines)


def deadlock(queues: Sequence[Queue], workers: Sequence[int] | None = None) -> str | None:
    """Where a run stops before its end; None where it does not.

    Args:
        workers: of each queue; None means one each, which proves all others (see above).
    """
    simulation = Simulation(queues, workers or [1] * len(queues))
    simulation.run()
    return None if simulation.finished else f"deadlock:\n{simulation.stuck()}"


def some(names: Sequence[str]) -> str:
    """The first of them, and how many there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
