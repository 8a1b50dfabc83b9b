"""The coordinator's judgement: when a failure ends the epoch, and what it costs whom. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

from elastic_trainer.agent.boards.board import Commit
from elastic_trainer.agent.membership.cause import Culprit, causes, settle_s
from elastic_trainer.agent.membership.effects import Conn, Context
from elastic_trainer.agent.membership.notices import WorkersFailed
from elastic_trainer.agent.membership.roles import Turn
from elastic_trainer.agent.membership.watch import Watch
from elastic_trainer.failures import Action, Kind

BUSY = ("starting", "running", "draining")
"""Phases in which workers of the epoch run."""


class Judge(Watch, ABC):
    """What an epoch's failures come to. `Coordinator` ends epochs and publishes the next.

    Args:
        ctx: shared with the roles before.
        expected: see Watch.
    """

    def __init__(self, ctx: Context, expected: dict[Conn, str] | None) -> None:
        super().__init__(ctx, expected)
        self.phase, self.reason = "idle", "start"
        self.members: tuple[str, ...] = ()
        """Agent ids of the current epoch."""
        self.lost_nodes: list[str] = []
        """Nodes of the last epoch that died since."""
        self.left_nodes: set[str] = set()
        """Of the lost ones, those that were asked to go: nobody is charged for them."""
        self.failed_reports: list[tuple[str | None, WorkersFailed]] = []
        """What the nodes of the last epoch said, in the order of arrival."""

    @abstractmethod
    def end_epoch(self, reason: str, victims: tuple[str, ...], *, stacks: bool = False) -> None:
        """Have the workers of the epoch killed; `stacks`: dump theirs first."""

    @abstractmethod
    def evict(self, node: str, host: str, reason: str) -> None:
        """Put the machine `host` out of the job, for what `node` did there."""

    @abstractmethod
    def stop(self, code: int, reason: str) -> Turn | None:
        """End the job."""

    def settle(self, report: WorkersFailed) -> None:
        """End the epoch once it can be told what a failure is: one node's, or that of all.

        That is when all nodes have said theirs, or a moment later (`cause.settle_s`).
        """
        if self.phase not in BUSY:
            return
        ctx, wait_s = self.ctx, settle_s(report.failure)
        if not wait_s or self._all_have_failed():
            self.settled()
        else:
            ctx.timers["settle"] = max(ctx.timers.get("settle", ctx.now), ctx.now + wait_s)

    def _all_have_failed(self) -> bool:
        if len(self.failed_reports) < len(self.members):
            return False  # the cheap question first: every member asks it
        heard = {node for node, _ in self.failed_reports}
        peers = map(self.peers.get, self.members)
        return all(peer.member.node in heard for peer in peers if peer is not None)

    def settled(self) -> None:
        """End the epoch for the failures that were reported."""
        if self.phase not in BUSY or not self.failed_reports:
            return
        primary = [r for r in self.failed_reports if r[1].failure.kind is not Kind.COLLATERAL]
        node, first = (primary or self.failed_reports)[0]
        victims = (node,) if primary and node else ()
        hangs = first.failure.kind is Kind.HANG
        self.end_epoch(f"worker failed: {first.failure.detail}", victims, stacks=hangs)

    def judge(self, commits: tuple[Commit, ...]) -> None:
        """Charge what ended the last epoch to a node or the job, and put it in words.

        Args:
            commits: checkpoints on storage.
        """
        ctx, settings = self.ctx, self.ctx.settings
        known = [self.peers.get(agent_id) for agent_id in self.members]
        gone = [p.member.node for p in known if p and p.conn is None and p.member != ctx.me]
        found = causes(self.lost_nodes + gone, self.failed_reports, len(self.members))
        if not found:
            return
        progress = self._progress(commits)
        left = self.left_nodes | {peer.member.node for peer in self.peers if peer.leaving}
        self.left_nodes = set()
        asked = [item for item in found if item.kind is Kind.NODE_LOST and item.node in left]
        self.reason = ", ".join(
            f"{item.node} left" if item in asked else str(item) for item in found
        )
        self.lost_nodes, self.failed_reports = [], []
        ctx.history = ctx.history.within(settings.window_s, ctx.now)
        for culprit in found:
            if culprit in asked:
                continue
            item = self._on_machine(culprit)
            ctx.history = ctx.history.add(item, ctx.now, progress)
            verdict = ctx.history.verdict(item, settings.limits, ctx.now, ctx.barred)
            if verdict.stop_code is not None:
                self.stop(verdict.stop_code, verdict.reason)
            elif verdict.evict is not None:
                self.evict(item.node or verdict.evict, verdict.evict, verdict.reason)
        if wait_s := ctx.history.backoff_s():
            ctx.log("epoch.delayed", seconds=wait_s, reason=self.reason)
            ctx.after("backoff", wait_s)

    def _on_machine(self, culprit: Culprit) -> Culprit:
        """Return it with the machine that the node had in the epoch that ended.

        Where all nodes share one, as in a small cluster of pods, nothing tells it from the
        program: errors are then nobody's.
        """
        everyone = self.ctx.everyone
        error = culprit.kind is not Kind.NODE_LOST and culprit.action is not Action.EVICT
        if culprit.node is None or (error and len(everyone.hosts_of(self.members)) == 1):
            return replace(culprit, node=None)
        return replace(culprit, host=everyone.host_of(culprit.node))

    def _progress(self, commits: tuple[Commit, ...]) -> int | None:
        """Return the newest committed step, on storage or in the nodes' memory."""
        told = (report.committed for _, report in self.failed_reports)
        steps = [*(commit.step for commit in commits), *told, self.ctx.history.progress]
        return max((step for step in steps if step is not None), default=None)
