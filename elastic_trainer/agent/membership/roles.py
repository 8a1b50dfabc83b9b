"""The role an agent plays in membership: seeking, following, campaigning, coordinating, done."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_trainer.agent.membership.effects import Conn, Context, Settings
from elastic_trainer.agent.membership.messages import (
    Differ,
    Elect,
    Join,
    Leaves,
    Message,
    Reject,
    Vote,
    Won,
)
from elastic_trainer.agent.membership.notices import JobStopped, Member, Report
from elastic_trainer.agent.membership.terms import differences
from elastic_trainer.board.state import BoardState, Lease, Token


@dataclass(frozen=True, slots=True)
class ToSeeker:
    """Transition to the board. `called`: who says to have won it, on which connection."""

    called: tuple[Conn, Won] | None = None


@dataclass(frozen=True, slots=True)
class ToFollower:
    """Take part under the coordinator of `term`, on the other end of `link`."""

    link: Conn
    term: int


@dataclass(frozen=True, slots=True)
class ToCandidate:
    """The coordinator is gone: campaign. `sure`: its address refused, so its process is dead."""

    sure: bool = False


@dataclass(frozen=True, slots=True)
class ToCoordinator:
    """The board is won."""

    state: BoardState
    token: Token
    expected: dict[Conn, str] | None = None
    """Members of the last epoch that will join on these links."""
    gone: tuple[str, ...] = ()
    """Dead nodes, for which a first epoch does not wait."""
    unheard: frozenset[Conn] = frozenset()
    """Links of `expected` on which nothing was said yet."""
    amid: bool = False
    """The job has had newer epochs than this agent knows."""


Transition = ToSeeker | ToFollower | ToCandidate | ToCoordinator | JobStopped
"""What a handler returns to hand over to another role; `machine.py` makes the role."""


def unfit_message(member: Member, settings: Settings) -> str:
    """Say why a node with too few healthy accelerators is refused."""
    return (
        f"{member.node} has {member.workers} healthy accelerators, "
        f"every node of this job needs {settings.workers}"
    )


def live_message(job: str, coordinator: Member | Lease) -> str:
    """Say why an agent of another submission may not take part."""
    who = f"{coordinator.node} ({coordinator.address}:{coordinator.port})"
    return (
        f"the run is live in job {job}, coordinated by {who}: cancel that job first, or wait for "
        "its end"
    )


def excluded_message(host: str, reason: str) -> str:
    """Say why no agent on a machine may take part."""
    return f"{host} is excluded from the job: {reason}"


class Role:
    """Base of all roles: answers what any agent must answer, ignores the rest.

    A handler that returns a transition hands over.
    """

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx

    def start(self) -> Transition | None:
        """Called once when the role is taken."""
        return None

    def opened(self, conn: Conn) -> Transition | None:
        """A dial succeeded."""
        return None

    def closed(self, conn: Conn, *, refused: bool) -> Transition | None:
        """A connection ended or a dial failed; `refused`: the host answered, nobody listens."""
        return None

    def received(self, conn: Conn, message: Message) -> Transition | None:
        """Handle a message; other roles override and fall back to this."""
        match message:
            case Join():
                self.ctx.send(conn, Reject(code=None, reason="not the coordinator"))
                self.ctx.close(conn)
            case Differ(node=node, terms=theirs):
                ours = self.ctx.settings.terms
                self.ctx.warn_of(differences(ours, theirs, (self.ctx.me.node, node))[1])
                self.ctx.join(conn, said=True)
            case Elect(job=job, term=term):
                lost = job == self.ctx.job and self.has_lost(term)
                self.ctx.send(conn, Vote(lost=lost))
            case Leaves(member=member):
                self.ctx.leaving[member.agent_id] = member
            case _:
                pass
        return None

    def has_lost(self, term: int) -> bool:
        """Whether this agent, too, has lost the coordinator of `term`."""
        return False

    def board_read(self, state: BoardState | None, token: Token | None) -> Transition | None:
        """Take the answer to ReadBoard."""
        return None

    def board_swapped(self, state: BoardState, token: Token, *, won: bool) -> Transition | None:
        """Take the answer to SwapBoard: the newest content, and whether it is ours."""
        return None

    def board_failed(self, error: str, *, gone: bool) -> Transition | None:
        """Take a failed board call: its storage does not answer. Roles try again by a timer."""
        return None

    def store_opened(self, epoch: int, address: str, port: int) -> Transition | None:
        """Take the answer to OpenStore."""
        return None

    def reported(self, report: Report) -> Transition | None:
        """Take a report of the local agent; a later coordinator gets it then."""
        self.ctx.note(report)
        return None

    def woken(self) -> Transition | None:
        """This process was stopped, and continues."""
        return None

    def timer(self, name: str) -> Transition | None:
        """Handle a timer that fired."""
        return None


class Done(Role):
    """The job is over for this agent."""

    def __init__(self, ctx: Context, end: JobStopped) -> None:
        super().__init__(ctx)
        self._end = end

    def start(self) -> Transition | None:
        """Tell the local agent, once."""
        self.ctx.timers.clear()
        self.ctx.tell(self._end)
        return None

    def received(self, conn: Conn, message: Message) -> Transition | None:
        """Have no vote: whoever asks takes this agent for gone, as it will be in a moment."""
        if isinstance(message, Elect):
            self.ctx.close(conn)
            return None
        return super().received(conn, message)
