"""Succession: what the members of an epoch do when its coordinator is gone. Pure.

Successors try in member order. Each dials those ahead of it and goes at once when all of them
refuse; so a rack that died with the coordinator holds up nobody. A candidate
takes the board only with more than half of the last members, or once all it reached
have lost the old coordinator too and its death is sure: its address refuses, or its
beat on the board stands still. The board's swap decides in any case.

A campaign of thousands takes seconds of everybody's time. Where all are slow the next in line must
not begin theirs, or look at the board ever again, before they hear of the one under way: these
would leave no time for any. So whoever hears of one waits for its turn in line, and whoever is late
hears the others first.
"""

from __future__ import annotations

from dataclasses import replace

from elastic_trainer.agent.membership.effects import Conn, Context, ReadBoard, SwapBoard
from elastic_trainer.agent.membership.lease import lease_of
from elastic_trainer.agent.membership.messages import Elect, Message, Vote, Won
from elastic_trainer.agent.membership.notices import JobStopped, Member
from elastic_trainer.agent.membership.roles import Role, ToCoordinator, ToSeeker, Transition
from elastic_trainer.agent.membership.seeker import RETRY_S
from elastic_trainer.board.state import BoardState, Lease, Token
from elastic_trainer.record.failures import EXIT_DONE

PEEK_S, SLOWEST_PEEK_S = 0.5, 2.0
"""How often a candidate, or one in line, looks whether the job has gone on without it: those of
each further block, who are many, so much more seldom. A newcomer that leads waits longer."""
WATCH_RENEWALS = 1.5
"""How long a lease's beat must stand still before few may take it, in times of its renewal."""
MIN_WATCH_S = 1.0
BLOCK = 16
"""So many successors look at each other; each further block waits one delay longer."""
MOST_DELAYS = 4
"""So many times, each longer than the last, somebody who is late puts its campaign off."""


class Candidate(Role):
    """Candidate (or voter that waits for an earlier candidate) after the loss of `ctx.term`."""

    def __init__(self, ctx: Context, *, sure: bool) -> None:
        super().__init__(ctx)
        self._sure = sure
        self._watched: int | None = None
        """The lease's beat when a candidate without a majority first looked."""
        self._dialed: dict[Conn, Member] = {}
        self._votes: dict[str, bool] = {}
        """agent_id -> has it lost the coordinator too."""
        self._gone: set[str] = set()
        """agent_ids that could not be reached."""
        self._running = False
        self._quiet = False
        """Who has not voted by now is not there, though its kernel takes connections: stopped."""
        self._swapping = False
        self._behind = False
        """The job has had newer epochs than this agent knows."""
        self._peeks = 0
        """Looks at the board whose answers, which come in order, are still out."""
        self._rival: tuple[Conn, int] | None = None
        """Whence an earlier candidate has asked for the vote, and how far ahead in line it is."""
        self._delays = 0
        line = [agent_id for agent_id in ctx.everyone.ids if agent_id != ctx.coordinator]
        place = line.index(ctx.me.agent_id)
        self._line, self._place, self._block = line, place, place // BLOCK
        self._peek_s = min(PEEK_S * (1 + self._block), SLOWEST_PEEK_S)
        self._ahead = set(line[self._block * BLOCK : place])
        """agent_ids of those who go first."""
        self._scouts: set[Conn] = set()
        """Dials that tell who of them lives."""
        self._num_others = len(line) - 1

    def start(self) -> Transition | None:
        """Campaign now when first in line, later otherwise."""
        ctx = self.ctx
        ctx.timers.clear()
        ctx.watch_fence(heard=False)
        ctx.after("peek", self._peek_s)
        if self._block:
            ctx.after("scout", self._block * ctx.settings.stagger_s)
            return None
        return self._scout()

    def _scout(self) -> Transition | None:
        """See who ahead lives: the dead, however many, cost one delay together.

        The turn comes when all refuse; else after one delay, and one more for each that lives.
        """
        ctx = self.ctx
        if not self._ahead:
            return self._campaign()
        ctx.after("campaign", ctx.settings.stagger_s)
        ahead = [m for m in ctx.everyone if m.agent_id in self._ahead]
        self._scouts = {ctx.dial(member.address, member.port) for member in ahead}
        return None

    def _recall_scouts(self) -> None:
        for conn in self._scouts:
            self.ctx.close(conn)
        self._scouts.clear()
        self.ctx.timers.pop("scout", None)

    def has_lost(self, term: int) -> bool:
        """Yes, unless the question is about another coordinator."""
        return term == self.ctx.term

    def received(self, conn: Conn, message: Message) -> Transition | None:
        """Count votes, yield to earlier candidates, join a winner."""
        ctx = self.ctx
        match message:
            case Elect(job=job, term=term, candidate=candidate) if job == ctx.job:
                ahead = self._line[: self._place]
                if candidate in ahead and term == ctx.term and not self._swapping:
                    # Give it, and each in line between, the time that a whole campaign takes.
                    behind = len(ahead) - ahead.index(candidate)
                    self._running, self._rival = False, (conn, behind)
                    self._recall_scouts()
                    ctx.after("campaign", 2 * ctx.settings.dial_timeout_s * behind)
                return super().received(conn, message)
            case Vote(lost=lost) if conn in self._dialed:
                self._votes[self._dialed[conn].agent_id] = lost
                if not lost:
                    ctx.after("ask", RETRY_S / 4)
                return self._try_to_win()
            case Won() if message.term > ctx.term and not self._swapping:
                self._close_all(but=conn)
                return ToSeeker((conn, message))
        return super().received(conn, message)

    def opened(self, conn: Conn) -> Transition | None:
        """Ask for the vote."""
        if conn in self._dialed:
            self._ask(conn)
        elif conn in self._scouts:
            self._scouts.discard(conn)
            self._ahead.clear()  # not all are dead
            self.ctx.close(conn)
            self.ctx.timers["campaign"] += self.ctx.settings.stagger_s
        return None

    def _ask(self, conn: Conn) -> None:
        ctx = self.ctx
        ctx.send(conn, Elect(candidate=ctx.me.agent_id, job=ctx.job, term=ctx.term))

    def closed(self, conn: Conn, *, refused: bool) -> Transition | None:
        """A member that cannot be reached has no vote."""
        member = self._dialed.pop(conn, None)
        if member is not None:
            self._votes.pop(member.agent_id, None)
            self._gone.add(member.agent_id)
            return self._try_to_win()
        if conn in self._scouts:
            self._scouts.discard(conn)
            if refused and self._ahead and not self._scouts:
                self._ahead.clear()
                return self._campaign()
        if self._rival is not None and conn == self._rival[0]:  # it is gone, or has given up
            self.ctx.after("campaign", self.ctx.settings.stagger_s * self._rival[1])
            self._rival = None
        return None

    @property
    def _has_majority(self) -> bool:
        return 2 * (1 + sum(self._votes.values())) > len(self.ctx.everyone)

    def _try_to_win(self) -> Transition | None:
        everybody = len(self._votes) + len(self._gone) == self._num_others
        all_reached_lost = all(self._votes.values()) and (everybody or self._quiet)
        watching = self._watched is not None and not self._has_majority
        may = self._running and not self._swapping and not watching
        if may and (self._has_majority or all_reached_lost):
            self._swapping = True
            self.ctx.outbox.append(ReadBoard())
        return None

    def board_read(self, state: BoardState | None, token: Token | None) -> Transition | None:
        """Swap if the board still shows what was lost; else seek the coordinator it shows."""
        ctx = self.ctx
        state = state or BoardState()
        lease = state.lease
        if state.epoch <= ctx.epoch:
            ctx.watch_fence(heard=True)
        if self._peeks:
            self._peeks -= 1
            return self._peeked(state)
        if not self._swapping:
            return None
        if state.finished:
            self._close_all()
            return JobStopped(EXIT_DONE, "the run has done its last step")
        won_unheard = lease is not None and lease.holder == ctx.me.agent_id
        if won_unheard and token is not None:
            return self.board_swapped(state, token, won=True)
        # The old coordinator lives, and left us out; or it died before it could tell anybody.
        gone_on = state.epoch > ctx.epoch and not self._sure
        if lease is None or lease.term != ctx.term or lease.job != ctx.job or gone_on:
            self._close_all()
            return ToSeeker()
        if not self._has_majority and not self._sure and self._watched != lease.beat:
            # Cut off with a few, or is it dead? Its beat on the board tells.
            if self._watched is not None:
                self._close_all()
                return ToSeeker()
            self._watched, self._swapping = lease.beat, False
            ctx.after("watch", self._watch_s(lease))
            return None
        term, beat, _ = ctx.renewed
        renewed_since = term == lease.term and lease.beat > beat + 1  # unheard by this agent
        self._behind = state.epoch > ctx.epoch and renewed_since
        ctx.outbox.append(SwapBoard(replace(state, lease=lease_of(ctx, ctx.term + 1)), token))
        return None

    def _watch_s(self, lease: Lease) -> float:
        """Return for how long the beat must still stand, from its holder's last word or from now.

        A moment at least: a holder that was paused with this agent renews once both continue.
        """
        whole_s = WATCH_RENEWALS * self.ctx.settings.lease_renew_s
        term, beat, heard = self.ctx.renewed
        if (term, beat) != (self.ctx.term, lease.beat):
            return whole_s
        return max(MIN_WATCH_S, whole_s - (self.ctx.now - heard))

    def _peeked(self, state: BoardState) -> Transition | None:
        """Give up when the job has gone on without this agent, another leads it, or it is over."""
        ctx, lease = self.ctx, state.lease
        over = state.finished or (lease is None and state.ended is not None)
        led = lease is not None and lease.term > ctx.term and lease.holder != ctx.me.agent_id
        if not led and not over and (state.epoch <= ctx.epoch or self._sure):
            return None
        self._close_all()
        return ToSeeker()

    def board_swapped(self, state: BoardState, token: Token, *, won: bool) -> Transition | None:
        """Coordinate, or look again: a checkpoint commit may have come between."""
        if not won:
            return self.board_read(state, token)
        ctx = self.ctx
        for conn in self._dialed:
            ctx.send(conn, Won(term=ctx.term + 1, coordinator=ctx.me.agent_id))
        expected = {conn: member.agent_id for conn, member in self._dialed.items()}
        unheard = frozenset(conn for conn, who in expected.items() if who not in self._votes)
        return ToCoordinator(state, token, expected, unheard=unheard, amid=self._behind)

    def board_failed(self, error: str, *, gone: bool) -> Transition | None:
        """Try again in a moment: without the board there is no new epoch."""
        if self._peeks:
            self._peeks -= 1
            return None
        self._swapping = False
        watching = self._watched is not None and not self._has_majority
        self.ctx.after("watch" if watching else "ask", RETRY_S)
        return None

    def timer(self, name: str) -> Transition | None:
        """Start the campaign, ask again, or start over when it led nowhere."""
        ctx = self.ctx
        if name == "fence":
            ctx.cut_off()
        if name == "scout":
            return self._scout()
        if name == "ask" and self._running:
            for conn, member in self._dialed.items():
                if not self._votes.get(member.agent_id, False):
                    self._ask(conn)
            return self._try_to_win()
        if name == "peek" and not self._swapping:
            self._peek()
        if name == "quiet":
            self._quiet = True
            return self._try_to_win()
        if name == "watch" and not self._swapping:
            self._swapping = True
            ctx.outbox.append(ReadBoard())
        if name == "campaign" and not self._puts_off():
            return self._campaign()
        return None

    def _puts_off(self) -> bool:
        """Whether this agent is so late that it hears the others first."""
        ctx = self.ctx
        late = ctx.late_s > ctx.settings.stagger_s / 10 and self._delays < MOST_DELAYS
        if late:
            self._delays += 1
            ctx.after("campaign", ctx.late_s + self._delays * ctx.settings.stagger_s)
        return late

    def _peek(self) -> None:
        self.ctx.after("peek", self._peek_s)
        if not self._peeks:  # a slow board answers in order: looks that queue up come late
            self._peeks += 1
            self.ctx.outbox.append(ReadBoard())

    def _campaign(self) -> Transition | None:
        ctx = self.ctx
        self._recall_scouts()
        self._rival = None  # its end must not cut this campaign short
        if self._swapping:
            ctx.after("campaign", RETRY_S)  # the board has yet to answer
            return None
        if self._running or self._dialed:
            self._close_all()
            return ToSeeker()
        self._running = True
        for member in ctx.everyone:
            if member.agent_id not in (ctx.me.agent_id, ctx.coordinator):
                self._dialed[ctx.dial(member.address, member.port)] = member
        # Members that neither answer nor refuse must not hold up the rest for ever.
        patience = max(4 * ctx.settings.dial_timeout_s, 3 * ctx.settings.lease_renew_s)
        ctx.after("campaign", patience)
        ctx.after("quiet", ctx.settings.dial_timeout_s)
        return self._try_to_win()

    def _close_all(self, but: Conn | None = None) -> None:
        self._recall_scouts()
        for conn in self._dialed:
            if conn != but:
                self.ctx.close(conn)
        self._dialed.clear()
