"""The role an agent plays in membership: seeking, following, campaigning, coordinating, done."""

from __future__ import annotations

from elastic_trainer.agent.board import BoardState, Token
from elastic_trainer.agent.effects import Conn, Context
from elastic_trainer.agent.messages import Elect, Join, Message, Reject, Vote
from elastic_trainer.agent.notices import JobStopped, Report


class Role:
    """Base of all roles: answers what any agent must answer, ignores the rest.

    A handler that returns a role hands over to it.
    """

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx

    def start(self) -> Role | None:
        """Called once when the role is taken."""
        return None

    def opened(self, conn: Conn) -> Role | None:
        """A dial succeeded."""
        return None

    def closed(self, conn: Conn, *, refused: bool) -> Role | None:
        """A connection ended or a dial failed; `refused`: the host answered, nobody listens."""
        return None

    def received(self, conn: Conn, message: Message) -> Role | None:
        """Handle a message; other roles override and fall back to this."""
        match message:
            case Join():
                self.ctx.send(conn, Reject(code=None, reason="not the coordinator"))
                self.ctx.close(conn)
            case Elect(job=job, term=term):
                lost = job == self.ctx.job and self.has_lost(term)
                self.ctx.send(conn, Vote(lost=lost))
            case _:
                pass
        return None

    def has_lost(self, term: int) -> bool:
        """Whether this agent, too, has lost the coordinator of `term`."""
        return False

    def board_read(self, state: BoardState | None, token: Token | None) -> Role | None:
        """Take the answer to ReadBoard."""
        return None

    def board_swapped(self, state: BoardState, token: Token, *, won: bool) -> Role | None:
        """Take the answer to SwapBoard: the newest content, and whether it is ours."""
        return None

    def board_failed(self, error: str) -> Role | None:
        """Take a failed board call: its storage does not answer. Roles try again by a timer."""
        return None

    def store_opened(self, epoch: int, address: str, port: int) -> Role | None:
        """Take the answer to OpenStore."""
        return None

    def reported(self, report: Report) -> Role | None:
        """Take a report of the local agent."""
        return None

    def timer(self, name: str) -> Role | None:
        """Handle a timer that fired."""
        return None


class Done(Role):
    """The job is over for this agent."""

    def __init__(self, ctx: Context, code: int, reason: str) -> None:
        super().__init__(ctx)
        self.code, self.reason = code, reason

    def start(self) -> Role | None:
        """Tell the local agent, once."""
        self.ctx.timers.clear()
        self.ctx.tell(JobStopped(code=self.code, reason=self.reason))
        return None
