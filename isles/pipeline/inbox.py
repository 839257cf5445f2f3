"""Messages that a worker waits for in a step: receives posted ahead, and the two orders in which tasks are done.

`planned`   in the order of a list that every worker knows: the same sums on any network.
`arrived`   whatever has come, the first by one of `ARRIVALS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from isles.comm.collectives.basic import all_done, any_done
from isles.comm.group import Group
from isles.comm.transport import Work
from isles.network.routing.routes import Route, Task
from isles.pipeline.wire import StageForm, phase, sender
from isles.wrapping import host_work

Rank = Callable[[Task, float], tuple[float, ...]]
"""Of a task whose beginning was there at a moment: the lowest is done first."""

ARRIVALS: dict[str, Rank] = {
    "arrival": lambda task, came: (task.kind == "F", came, task.microbatch, task.hop),
    "first come": lambda task, came: (came, task.microbatch, task.hop),
}
_LEAST, _MOST = 2, 8


def receives_ahead(room: int | None) -> int:
    """Receives posted before their task's turn, where so many forwards may be held (None: all): enough to hide a
    message behind the tasks before it, and no more memory than was asked for.
    """
    return _MOST if room is None else min(max(room, _LEAST), _MOST)


@dataclass(slots=True)
class StageInbox:
    """The messages of one step for one worker of `group`. first: what is added to a microbatch's number in the step to
    make it one of the run, which no two messages share.
    """

    group: Group
    form: StageForm
    routes: dict[int, Route]
    first: int
    posted: dict[Task, tuple[Work, Tensor]] = field(default_factory=dict)

    def address(self, task: Task) -> tuple[int, int]:
        """Round and phase of the message that `task` begins with."""
        return self.first + task.microbatch, phase(task)

    def post(self, task: Task) -> None:
        """Take what `task` begins with from its sender, if it comes over the wire."""
        source = sender(self.routes[task.microbatch], task)
        if source is None or task in self.posted:
            return
        number, step_phase = self.address(task)
        with host_work():  # a message lies on the host
            buffer = torch.empty(self.form.nbytes(task), dtype=torch.uint8, device="cpu")
            self.posted[task] = self.group.call("pipeline", round=number).recv(source, buffer, step_phase), buffer

    def is_here(self, task: Task) -> bool:
        """Whether what `task` begins with has come over the wire."""
        return task in self.posted and self.posted[task][0].done()

    def take(self, task: Task) -> Tensor:
        """The bytes, waited for."""
        work, buffer = self.posted.pop(task)
        if not work.done() or work.error is not None:
            self.group.start(all_done([work]), "pipeline", nbytes=buffer.numel()).wait()
        return buffer

    def wait_for_any(self) -> None:
        """Until something that was posted has come."""
        works = [work for work, _ in self.posted.values() if not work.done()]
        self.group.start(any_done(works), "pipeline", nbytes=max(b.numel() for _, b in self.posted.values())).wait()


def planned(tasks: Sequence[Task], inbox: StageInbox, ahead: int) -> Iterator[Task]:
    """`tasks` in their order, with the receives of the next `ahead` posted."""
    for task in tasks[:ahead]:
        inbox.post(task)
    for number, task in enumerate(tasks):
        if number + ahead < len(tasks):
            inbox.post(tasks[number + ahead])
        yield task


def arrived(
    tasks: Sequence[Task],
    inbox: StageInbox,
    since: Mapping[Task, float],
    has_room: Callable[[], bool],
    rank: Rank,
    ahead: int,
) -> Iterator[Task]:
    """`tasks` as what they begin with comes. since: the moments at which it was at this worker by itself, live;
    has_room: one more forward may be held; ahead: forwards whose receives are posted.
    """
    left = dict.fromkeys(tasks)
    while left:
        for task in _window(left, ahead):
            inbox.post(task)
        ready = [task for task in left if task in since or inbox.is_here(task)]
        ready = [task for task in ready if task.kind != "F" or has_room()]
        if not ready:
            inbox.wait_for_any()
            continue
        task = min(ready, key=lambda task: rank(task, since[task] if task in since else inbox.posted[task][0].at))
        del left[task]
        yield task


def _window(left: dict[Task, None], ahead: int) -> list[Task]:
    """The next forwards, and what comes back of all that have been: what is held must never wait for a receive that
    nobody posted.
    """
    forwards = [task for task in left if task.kind == "F"]
    back = [task for task in left if task.kind != "F"]  # L is of the origin, hop 0
    been = [task for task in back if Task("F", task.microbatch, 0 if task.kind == "L" else task.hop) not in left]
    return forwards[:ahead] + been
